"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id)?.textContent || "[]");

  // One step for the whole page: its slider moves pictures, values, progress and a line in the plots.
  const scrubbed = read("scrubbed");
  const stops = scrubbed.stops || [];
  const slider = document.getElementById("step");
  const newest = (steps, step) => steps.filter((one) => one <= step).length - 1; // place of the newest one, or -1
  let step = Infinity; // the end of the run

  // Pictures: buttons choose the panel of all strips of their group.
  const frames = read("frames");
  const strips = [...document.querySelectorAll(".strip[data-panels]")];
  const show = (strip) => {
    const group = strip.closest(".group");
    const titles = JSON.parse(group.dataset.panels || "[]");
    const [image, note] = strip.querySelector(".picture").children;
    const panels = JSON.parse(strip.dataset.panels);
    const steps = JSON.parse(strip.dataset.steps);
    const wanted = titles[group.querySelector("input[type=radio]:checked")?.value];
    const panel = panels.length === 1 ? 0 : panels.indexOf(wanted);
    const at = Math.max(0, newest(steps, step));
    const source = panel < 0 ? "" : frames[strip.dataset.number][panel][at];
    image.hidden = !source;
    note.hidden = Boolean(source);
    if (source && image.src !== source) image.src = source;
    image.alt = [strip.dataset.title, `step ${steps[at]}`, panels[panel]].filter(Boolean).join(", ");
    strip.querySelector("output").textContent = `step ${steps[at].toLocaleString("en")}`;
  };
  for (const group of document.querySelectorAll(".group")) {
    group.addEventListener("input", () => group.querySelectorAll(".strip[data-panels]").forEach(show));
  }

  const shown = [];
  const mark = (plot) => {
    for (const part of plot.center) {
      if (part.name === "step") part.setv({ location: step, visible: step < stops.at(-1) });
    }
  };
  const move = (place) => {
    step = stops[place];
    const text = step.toLocaleString("en");
    slider.value = step;
    slider.setAttribute("aria-valuetext", `step ${text}`);
    slider.nextElementSibling.textContent = text;
    const cells = document.querySelectorAll("#scrubber dd");
    Object.values(scrubbed.values).forEach((values, number) => (cells[number].textContent = values[place] || "–"));
    const bar = document.querySelector("progress");
    if (bar) bar.value = place === stops.length - 1 ? bar.dataset.end : step;
    strips.forEach(show);
    shown.forEach(mark);
  };
  if (slider) {
    const place = () => Math.max(0, newest(stops, step));
    const leap = Math.max(1, Math.round(stops.length / 10));
    const keys = { ArrowLeft: -1, ArrowRight: 1, PageDown: -leap, PageUp: leap, Home: -Infinity, End: Infinity };
    slider.addEventListener("input", () => {
      const after = stops.findIndex((one) => one >= slider.value);
      const isNearer = after > 0 && slider.value - stops[after - 1] < stops[after] - slider.value;
      move(after < 0 ? stops.length - 1 : after - isNearer);
    });
    document.addEventListener("keydown", (event) => {
      const isSlider = event.target === slider;
      const own = isSlider ? { ...keys, ArrowDown: -1, ArrowUp: 1 } : { ArrowLeft: -1, ArrowRight: 1 };
      const isModified = event.ctrlKey || event.altKey || event.metaKey || event.shiftKey;
      // Other controls, and tables that scroll, have these keys for themselves.
      if (!(event.key in own) || isModified || (!isSlider && event.target.closest("input, pre, .scroll, .bk-toolbar"))) return;
      event.preventDefault();
      move(Math.min(stops.length - 1, Math.max(0, place() + own[event.key])));
    });
    // A link to a section leads below the bar with the values, whose height depends on them and on the width.
    const bar = document.querySelector("nav");
    const root = document.documentElement.style;
    new ResizeObserver(() => (root.scrollPaddingTop = `${bar.offsetHeight + 8}px`)).observe(bar);
    move(stops.length - 1);
  } else {
    strips.forEach(show); // a browser may have kept the state of a button
  }

  // Plots: one after the other, so that the page can be read at once.
  const style = getComputedStyle(document.documentElement);
  const paint = (plot) => {
    const [ink, line] = ["--muted", "--line"].map((name) => style.getPropertyValue(name).trim());
    for (const axis of [...plot.below, ...plot.left]) {
      axis.setv({ axis_label_text_color: ink, major_label_text_color: ink });
    }
    for (const part of plot.center) {
      if (part.type === "Grid" && part.grid_line_color) part.setv({ grid_line_color: line, grid_line_alpha: 1 });
    }
  };
  const isFine = matchMedia("(pointer: fine)").matches; // a finger on a plot should scroll the page
  const draw = async () => {
    if (self.Bokeh) Bokeh.set_log_level("warn");
    for (const [number, item] of read("plots").entries()) {
      const place = document.getElementById(`plot-${number}`);
      const views = await Bokeh.embed.embed_item(item, place);
      for (const { model } of views.roots) {
        if (!model.below) continue; // Bokeh's own messages
        shown.push(model);
        paint(model);
        if (step < stops.at(-1)) mark(model);
        if (isFine) model.toolbar.tools.find((tool) => tool.type === "BoxZoomTool").active = true;
      }
      await new Promise((resolve) => setTimeout(resolve));
    }
    document.documentElement.dataset.ready = "yes";
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown.forEach(paint));
  draw();
})();
