"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  button.hidden = false;
  const dark = () => root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  const show = (value) => {
    const size = Math.abs(value);
    if (value === null || !isFinite(value)) return "–";
    if (size >= 100) return Math.round(value).toLocaleString("en-US");
    if (size === 0) return "0";
    return String(+value.toPrecision(3));
  };
  const tip = (figure) => {
    let box = figure.querySelector(".tip");
    if (!box) {
      box = document.createElement("div");
      box.className = "tip";
      figure.append(box);
    }
    return box;
  };
  const place = (figure, box, event) => {
    const frame = figure.getBoundingClientRect();
    const x = event.clientX - frame.left;
    const left = x + box.offsetWidth + 24 > frame.width ? x - box.offsetWidth - 14 : x + 14;
    box.style.left = Math.max(0, left) + "px";
    box.style.top = event.clientY - frame.top - 10 + "px";
  };
  const line = (box, text, series) => {
    const row = document.createElement("div");
    if (series !== undefined) {
      const key = document.createElement("i");
      key.className = "f" + series;
      key.style.cssText = "display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px";
      row.append(key);
    }
    row.append(text);
    box.append(row);
  };

  const save = (name, type, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const cell = (text) => /[",\n]/.test(text) ? '"' + String(text).replaceAll('"', '""') + '"' : text;
  const axisName = (axis) => axis.unit ? axis.name + ", " + axis.unit : axis.name;
  const csv = (data) => [
    ["series", axisName(data.x), axisName(data.y), "name"],
    ...data.lines.flatMap((l) => l.points.map((p) => [l.name, p[0], p[1], p[2] ?? ""])),
  ].map((row) => row.map(cell).join(",") + "\n").join("");
  // With the page's style, whose colors and fonts it has.
  const picture = (svg) => {
    const copy = svg.cloneNode(true);
    const style = document.createElementNS("http://www.w3.org/2000/svg", "style");
    style.textContent = document.querySelector("style").textContent + "svg{background:var(--back)}";
    copy.querySelector(".hover")?.remove();
    copy.prepend(style);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.dataset.theme = dark() ? "dark" : "light";
    return copy.outerHTML;
  };
  const buttons = (figure, data) => {
    const name = figure.querySelector("figcaption").firstChild.textContent.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-");
    const bar = document.createElement("span");
    bar.className = "save";
    for (const [text, act] of [
      ["CSV", () => save(name + ".csv", "text/csv", csv(data))],
      ["SVG", () => save(name + ".svg", "image/svg+xml", picture(figure.querySelector("svg")))],
    ]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.title = "save as " + text;
      button.addEventListener("click", act);
      bar.append(button);
    }
    figure.querySelector("figcaption").append(bar);
  };
  // A name in the legend shows or hides its series.
  const choice = (figure, data) => {
    for (const key of figure.querySelectorAll(".legend [data-line]")) {
      const at = key.dataset.line;
      key.tabIndex = 0;
      key.setAttribute("role", "switch");
      key.setAttribute("aria-checked", "true");
      const flip = () => {
        const hide = !data.lines[at].hidden;
        data.lines[at].hidden = hide;
        key.setAttribute("aria-checked", String(!hide));
        for (const part of figure.querySelectorAll('svg [data-line="' + at + '"]')) part.style.display = hide ? "none" : "";
      };
      key.addEventListener("click", flip);
      key.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); flip(); }
      });
    }
  };

  // What the pointer is on: the nearest point of each line by x, or the nearest of all points.
  for (const figure of document.querySelectorAll("figure.chart")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const svg = figure.querySelector("svg");
    buttons(figure, data);
    choice(figure, data);
    const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
    rule.setAttribute("class", "hover");
    const scale = (axis, value) => axis.log ? Math.log(value) : value;
    const along = (axis, value) =>
      (scale(axis, value) - scale(axis, axis.min)) / (scale(axis, axis.max) - scale(axis, axis.min));
    const px = (x) => data.left + along(data.x, x) * (data.right - data.left);
    const py = (y) => data.bottom - along(data.y, y) * (data.bottom - data.top);
    svg.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect();
      const at = (event.clientX - frame.left) * data.width / frame.width;
      const up = (event.clientY - frame.top) * data.width / frame.width;
      let found = data.lines.map((l, index) => {
        let best = null;
        if (l.hidden) return best;
        for (const p of l.points) {
          const far = Math.abs(px(p[0]) - at) + (data.both ? Math.abs(py(p[1]) - up) : 0);
          if (best === null || far < best.far) best = { far, p, l, index };
        }
        return best;
      }).filter((b) => b !== null);
      if (!found.length) return;
      const nearest = found.reduce((a, b) => (b.far < a.far ? b : a));
      if (data.both) found = [nearest];
      const x = px(nearest.p[0]);
      rule.setAttribute("x1", x); rule.setAttribute("x2", x);
      rule.setAttribute("y1", data.top); rule.setAttribute("y2", data.bottom);
      svg.append(rule);
      const box = tip(figure);
      box.replaceChildren();
      const shared = found.every((b) => b.p[0] === nearest.p[0]);
      if (shared) line(box, data.x.name + " " + show(nearest.p[0]) + " " + data.x.unit);
      for (const b of found) {
        const beside = shared ? "" : " at " + show(b.p[0]) + " " + data.x.unit;
        const unit = data.y.unit === "1/s" ? "/s" : " " + data.y.unit;
        line(box, (b.p[2] || b.l.name) + " " + show(b.p[1]) + unit + beside, b.l.color);
      }
      place(figure, box, event);
    });
    svg.addEventListener("pointerleave", () => {
      rule.remove();
      figure.querySelector(".tip")?.remove();
    });
  }

  const rgb = (name) => {
    const text = getComputedStyle(root).getPropertyValue(name).trim();
    return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  };
  const heats = [...document.querySelectorAll("figure.heat")].map((figure) => {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const canvas = figure.querySelector("canvas");
    const level = (row, column) => {
      const at = 2 * (row * data.columns + column);
      return parseInt(data.levels.slice(at, at + 2), 16);
    };
    canvas.addEventListener("pointermove", (event) => {
      const frame = canvas.getBoundingClientRect();
      const within = (value, count) => Math.min(count - 1, Math.max(0, Math.floor(value * count)));
      const column = within((event.clientX - frame.left) / frame.width, data.columns);
      const row = within((event.clientY - frame.top) / frame.height, data.rows.length);
      const box = tip(figure);
      box.replaceChildren();
      line(box, data.rows[row] + ", " + show(column * data.step) + " to " +
        show((column + 1) * data.step) + " " + data.time);
      line(box, show(level(row, column) / 255 * data.max) + " " + data.unit);
      place(figure, box, event);
    });
    canvas.addEventListener("pointerleave", () => figure.querySelector(".tip")?.remove());
    return () => {
      const stops = [rgb("--heat0"), rgb("--heat1"), rgb("--heat2")];
      canvas.width = data.columns;
      canvas.height = data.rows.length;
      const context = canvas.getContext("2d");
      const image = context.createImageData(data.columns, data.rows.length);
      for (let row = 0; row < data.rows.length; row++) {
        for (let column = 0; column < data.columns; column++) {
          const share = level(row, column) / 255 * 2;
          const low = Math.min(1, Math.floor(share));
          const at = 4 * (row * data.columns + column);
          for (let c = 0; c < 3; c++) {
            image.data[at + c] = stops[low][c] + (stops[low + 1][c] - stops[low][c]) * (share - low);
          }
          image.data[at + 3] = 255;
        }
      }
      context.putImageData(image, 0, 0);
    };
  });
  const draw = () => heats.forEach((heat) => heat());
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    draw();
  });
})();
