"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id)?.textContent || "[]");

  // Pictures: a slider chooses the step, and buttons the panel of all sliders of their group.
  const frames = read("frames");
  for (const group of document.querySelectorAll(".group")) {
    const strips = [...group.querySelectorAll(".strip[data-panels]")];
    const titles = JSON.parse(group.dataset.panels || "[]");
    const draw = (strip) => {
      const [image, note] = strip.querySelector(".picture").children;
      const slider = strip.querySelector("input[type=range]");
      const panels = JSON.parse(strip.dataset.panels);
      const steps = JSON.parse(strip.dataset.steps);
      const wanted = titles[group.querySelector("input[type=radio]:checked")?.value];
      const panel = panels.length === 1 ? 0 : panels.indexOf(wanted);
      const at = slider ? Number(slider.value) : steps.length - 1;
      const source = panel < 0 ? "" : frames[strip.dataset.number][panel][at];
      image.hidden = !source;
      note.hidden = Boolean(source);
      if (source) image.src = source;
      image.alt = [strip.dataset.title, `step ${steps[at]}`, panels[panel]].filter(Boolean).join(", ");
      strip.querySelector("output").textContent = `step ${steps[at].toLocaleString("en")}`;
      slider?.setAttribute("aria-valuetext", `step ${steps[at]}`);
    };
    group.addEventListener("input", (event) => {
      const strip = event.target.closest(".strip");
      (strip ? [strip] : strips).forEach(draw);
    });
    strips.forEach(draw); // a browser may have kept the place of a slider
  }

  // Plots: one after the other, so that the page can be read at once.
  const style = getComputedStyle(document.documentElement);
  const shown = [];
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
        if (isFine) model.toolbar.tools.find((tool) => tool.type === "BoxZoomTool").active = true;
      }
      await new Promise((resolve) => setTimeout(resolve));
    }
    document.documentElement.dataset.ready = "yes";
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown.forEach(paint));
  draw();
})();
