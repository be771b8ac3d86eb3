// The search of pages that are opened as files: a browser starts no worker there, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.inside = frame.contentWindow;
      const page = this.inside.document;
      page.open();
      page.write("<body></body>");
      page.close();
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => {
        const script = page.createElement("script");
        script.onload = resolve;
        script.src = url;
        page.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
