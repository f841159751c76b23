"use strict";
// Draws the charts of a report from the JSON in the page. The root element says `data-drawn="N"` when all N charts have drawn.
(() => {
  const charts = JSON.parse(document.getElementById("report-data").textContent);
  const figures = [...document.querySelectorAll("figure.chart")];
  const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];
  const BORDERS = ["solid", "dashed", "dotted", "double"];
  /** Colours repeat after eight, with other dashes. */
  const dash = (series) => (series.dash + Math.floor(series.colour / 8)) % DASHES.length;
  const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const plots = new Map();
  const drawn = new Set();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => (value == null ? "–" : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
    ? value.toExponential(3) : String(Number(value.toPrecision(5))));

  /** Steps are stored as differences. */
  function table(series) {
    let step = 0;
    return [series.x.map((difference) => (step += difference)), series.y];
  }
  for (const chart of charts) chart.data = uPlot.join(chart.series.map(table));

  /** The point of a curve that is nearest to the cursor: curves of several runs have different steps. */
  function nearest(plot, series, index) {
    const values = plot.data[series];
    if (series === 0 || values[index] != null) return index;
    for (let away = 1; away < values.length; away++) {
      if (values[index - away] != null) return index - away;
      if (values[index + away] != null) return index + away;
    }
    return index;
  }

  function lines(chart) {
    return (plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      const line = (x0, y0, x1, y1, stroke, dash) => {
        ctx.strokeStyle = stroke;
        ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
        ctx.beginPath();
        ctx.moveTo(x0, y0);
        ctx.lineTo(x1, y1);
        ctx.stroke();
      };
      ctx.lineWidth = devicePixelRatio;
      for (const [step] of chart.marks) {
        const x = plot.valToPos(step, "x", true);
        line(x, bbox.top, x, bbox.top + bbox.height, colour("--bad"), [1, 3]);
      }
      let above = Infinity; // where the last label is: those of equal figures would cover each other
      for (const level of [...chart.levels].sort((one, other) => one.value - other.value)) {
        const y = plot.valToPos(level.value, "y", true);
        line(bbox.left, y, bbox.left + bbox.width, y, colour(`--c${level.colour % 8}`), [1, 2]);
        if (above - y < 14 * devicePixelRatio) continue;
        above = y;
        ctx.fillStyle = colour("--text");
        ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
        ctx.textAlign = "left";
        ctx.textBaseline = "alphabetic";
        ctx.fillText(`${level.label} ${short(level.value)}`, bbox.left + 6, y - 4 * devicePixelRatio);
      }
      ctx.restore();
    };
  }

  /** The range of the values and of the levels, which uPlot does not know. */
  function range(chart, logarithmic) {
    return (plot, least, most) => {
      const levels = chart.levels.map((level) => level.value);
      const low = Math.min(least ?? Infinity, ...levels);
      const high = Math.max(most ?? -Infinity, ...levels);
      if (!Number.isFinite(low)) return [0, 1];
      if (logarithmic) return uPlot.rangeLog(low, high, 10, true);
      return uPlot.rangeNum(low, high, 0.08, true);
    };
  }

  function options(chart, figure, width) {
    const logarithmic = figure.querySelector(".log").getAttribute("aria-pressed") === "true";
    const text = colour("--text"), grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: text, grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const values = (plot, marks) => marks.map((value) => (value == null ? "" : Math.abs(value) < 1e4 ? short(value) : COMPACT.format(value)));
    return {
      width,
      height: 240,
      cursor: { sync: { key: "steps", scales: ["x", null] }, dataIdx: nearest, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1, range: range(chart, logarithmic) } },
      axes: [axis, { ...axis, values, size: 62 }],
      series: [
        { label: "step", value: (plot, value) => (value == null ? "–" : value.toLocaleString("en")) },
        ...chart.series.map((series) => ({
          label: series.label,
          stroke: colour(`--c${series.colour % 8}`),
          dash: DASHES[dash(series)],
          width: 1.5,
          value: (plot, value) => short(value),
        })),
      ],
      legend: { markers: { dash: (plot, index) => BORDERS[dash(chart.series[index - 1])] }, mount: (plot, legend) => figure.querySelector(".legend").replaceChildren(legend) },
      hooks: {
        draw: [lines(chart), () => {
          drawn.add(figure);
          if (drawn.size === figures.length) document.documentElement.dataset.drawn = String(drawn.size);
        }],
      },
    };
  }

  function draw(figure) {
    const chart = charts[Number(figure.dataset.chart)];
    const place = figure.querySelector(".plot");
    plots.get(figure)?.destroy();
    plots.set(figure, new uPlot(options(chart, figure, place.clientWidth), chart.data, place));
    for (const name of figure.querySelectorAll(".u-series:not(:first-child) th")) {
      name.tabIndex = 0;
      name.setAttribute("role", "button");
      name.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        name.click();
      });
    }
  }

  /** The numbers of a chart as a table, made when it is opened. */
  function fill(details, chart) {
    const table = document.createElement("table");
    const row = (parent, tag, cells) => {
      const line = parent.appendChild(document.createElement("tr"));
      cells.forEach((cell, index) => {
        const made = line.appendChild(document.createElement(index === 0 ? "th" : tag));
        made.scope = tag === "th" ? "col" : index === 0 ? "row" : "";
        made.textContent = cell;
      });
    };
    row(table.createTHead(), "th", ["step", ...chart.series.map((series) => series.label)]);
    const body = table.createTBody();
    const [steps, ...values] = chart.data;
    steps.forEach((step, at) => row(body, "td", [step.toLocaleString("en"), ...values.map((own) => (own[at] === undefined ? "" : own[at] === null ? "–" : String(own[at])))]));
    details.querySelector(".scroll").replaceChildren(table);
  }

  for (const figure of figures) {
    const chart = charts[Number(figure.dataset.chart)];
    const log = figure.querySelector(".log");
    const values = [...chart.series.flatMap((series) => series.y), ...chart.levels.map((level) => level.value)].filter((value) => value != null);
    const [least, most] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    log.hidden = least <= 0 || most < 4 * least;
    log.setAttribute("aria-label", `logarithmic scale: ${chart.title}`);
    log.addEventListener("click", () => {
      log.setAttribute("aria-pressed", String(log.getAttribute("aria-pressed") !== "true"));
      draw(figure);
    });
    const details = figure.querySelector("details");
    const show = () => {
      if (details.open && !details.querySelector("table")) fill(details, chart);
    };
    details.addEventListener("toggle", show);
    show();
    draw(figure);
  }
  document.getElementById("reset")?.addEventListener("click", () => {
    for (const plot of plots.values()) plot.setScale("x", { min: plot.data[0][0], max: plot.data[0].at(-1) });
  });
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = plots.get(target.parentElement);
      if (plot && target.clientWidth > 0 && plot.width !== target.clientWidth) plot.setSize({ width: target.clientWidth, height: 240 });
    }
  });
  for (const figure of figures) resized.observe(figure.querySelector(".plot"));
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => figures.forEach(draw));
  }
  if (figures.length === 0) document.documentElement.dataset.drawn = "0";
})();
