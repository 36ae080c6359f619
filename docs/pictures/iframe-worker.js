// SPDX-License-Identifier: Apache-2.0
// Search in pages that are opened from a folder: browsers start no worker from file://. This worker
// is a hidden frame, which runs the same script in the page's own thread.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const source = new URL(url, location.href);
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      const page = inside.document;
      // What the script of a worker has, and a frame has not, or has with another meaning.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => urls.reduce(
        (before, one) => before.then(() => new Promise((loaded, failed) => {
          const script = page.createElement("script");
          Object.assign(script, { src: new URL(one, source).href, onload: loaded, onerror: failed });
          page.body.append(script);
        })), Promise.resolve());
      this.ready = inside.importScripts(source);
      this.ready.catch(() => this.dispatchEvent(new Event("error")));
    }
    postMessage(data) {
      this.ready.then(() => {
        const inside = this.frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      });
    }
    terminate() {
      this.frame.remove();
    }
  };
}
