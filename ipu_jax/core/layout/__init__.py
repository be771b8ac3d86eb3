"""Place weights and state: packed arrays for the stages of one IPU, split or whole arrays for concurrent stages."""
