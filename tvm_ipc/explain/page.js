// Without this script a tensor's title shows what it is; with it, a panel below the plan does,
// which works where there is no pointer, and the plan can be stretched.
for (const plan of document.querySelectorAll(".plan")) {
  const panel = document.createElement("p");
  panel.className = "detail";
  panel.setAttribute("aria-live", "polite");
  panel.textContent = "Point at a tensor, or tap it, to see what it is.";
  plan.querySelector(".grid").after(panel);
  const words = new Map();
  for (const shape of plan.querySelectorAll(".t")) {
    const title = shape.querySelector("title");
    if (!title) continue; // the legend's
    words.set(shape, title.textContent);
    title.remove();
  }
  let shown = null;
  const show = (event) => {
    const shape = event.target.closest ? event.target.closest(".t") : null;
    if (!words.has(shape) || shape === shown) return;
    if (shown) shown.classList.remove("on");
    shown = shape;
    shape.classList.add("on");
    panel.textContent = words.get(shape);
  };
  plan.addEventListener("pointerover", show);
  plan.addEventListener("click", show);

  const scroll = plan.querySelector(".scroll");
  const buttons = document.createElement("div");
  buttons.className = "zoom";
  let zoom = 1;
  const stretch = (to) => {
    const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / scroll.scrollWidth;
    zoom = Math.min(64, Math.max(1, to));
    plan.style.setProperty("--zoom", zoom);
    scroll.scrollLeft = middle * scroll.scrollWidth - scroll.clientWidth / 2;
    for (const hatch of plan.querySelectorAll("pattern")) {
      hatch.setAttribute("patternTransform", `scale(${1 / zoom} 1)`);
    }
  };
  const actions = [
    ["\u2212", "narrower", () => stretch(zoom / 2)],
    ["fit", "as wide as the page", () => stretch(1)],
    ["+", "wider", () => stretch(zoom * 2)],
  ];
  for (const [text, label, action] of actions) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.setAttribute("aria-label", label);
    button.addEventListener("click", action);
    buttons.append(button);
  }
  plan.prepend(buttons);
}
