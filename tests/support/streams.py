"""A stream that knows where it is, as sources with a state of their own do."""


class StatefulItems:
    """An iterator over items that begins again after its end, and can return to a position."""

    def __init__(self, items):
        self.items, self.at = items, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.items):
            self.at = 0
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
