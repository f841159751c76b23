"use strict";
// Draws the charts of a report from the JSON in the page. The root element says `data-drawn="N"` when all N charts have drawn.
// A page with `data-live` fetches itself again and takes over what is new; `data-renewed="N"` counts how often something was.
(() => {
  let charts = [];
  let figures = [];
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
  function read(page) {
    charts = JSON.parse(page.getElementById("report-data").textContent);
    for (const chart of charts) chart.data = uPlot.join(chart.series.map(table));
  }
  const chartOf = (figure) => charts[Number(figure.dataset.chart)];

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

  function lines(figure) {
    return (plot) => {
      const chart = chartOf(figure);
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
  function range(figure, logarithmic) {
    return (plot, least, most) => {
      const levels = chartOf(figure).levels.map((level) => level.value);
      const low = Math.min(least ?? Infinity, ...levels);
      const high = Math.max(most ?? -Infinity, ...levels);
      if (!Number.isFinite(low)) return [0, 1];
      if (logarithmic) return uPlot.rangeLog(low, high, 10, true);
      return uPlot.rangeNum(low, high, 0.08, true);
    };
  }

  function options(figure, width) {
    const chart = chartOf(figure);
    const logarithmic = figure.querySelector(".log").getAttribute("aria-pressed") === "true";
    const text = colour("--text"), grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: text, grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const values = (plot, marks) => marks.map((value) => (value == null ? "" : Math.abs(value) < 1e4 ? short(value) : COMPACT.format(value)));
    return {
      width,
      height: 240,
      cursor: { sync: { key: "steps", scales: ["x", null] }, dataIdx: nearest, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1, range: range(figure, logarithmic) } },
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
        draw: [lines(figure), () => {
          drawn.add(figure);
          if (drawn.size === figures.length) document.documentElement.dataset.drawn = String(drawn.size);
        }],
      },
    };
  }

  function draw(figure) {
    const place = figure.querySelector(".plot");
    plots.get(figure)?.destroy();
    plots.set(figure, new uPlot(options(figure, place.clientWidth), chartOf(figure).data, place));
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

  /** A logarithmic scale is offered for positive values that are far apart; the table of numbers is kept current while it is open. */
  function describe(figure) {
    const chart = chartOf(figure);
    const values = [...chart.series.flatMap((series) => series.y), ...chart.levels.map((level) => level.value)].filter((value) => value != null);
    const [least, most] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    const log = figure.querySelector(".log");
    log.hidden = (least <= 0 || most < 4 * least) && log.getAttribute("aria-pressed") !== "true";
    const details = figure.querySelector("details");
    if (details.open) fill(details, chart);
    else details.querySelector("table")?.remove(); // made again when it is opened
  }

  function start(figure) {
    const log = figure.querySelector(".log");
    log.setAttribute("aria-label", `logarithmic scale: ${chartOf(figure).title}`);
    log.addEventListener("click", () => {
      log.setAttribute("aria-pressed", String(log.getAttribute("aria-pressed") !== "true"));
      draw(figure);
    });
    const details = figure.querySelector("details");
    details.addEventListener("toggle", () => {
      if (details.open && !details.querySelector("table")) fill(details, chartOf(figure));
    });
    describe(figure);
    draw(figure);
    resized.observe(figure.querySelector(".plot"));
  }

  /** Draws what was read again. An enlarged part stays enlarged. */
  function redraw(figure) {
    const plot = plots.get(figure), chart = chartOf(figure);
    const labels = plot.series.slice(1).map((series) => series.label);
    if (JSON.stringify(labels) !== JSON.stringify(chart.series.map((series) => series.label))) {
      draw(figure);
    } else {
      const { min, max } = plot.scales.x;
      const isWhole = min <= plot.data[0][0] && max >= plot.data[0].at(-1);
      plot.setData(chart.data, isWhole);
      if (!isWhole) plot.setScale("x", { min, max });
    }
    describe(figure);
  }

  function show() {
    figures = [...document.querySelectorAll("figure.chart")];
    for (const figure of [...plots.keys()].filter((known) => !figures.includes(known))) {
      plots.get(figure).destroy();
      plots.delete(figure);
      drawn.delete(figure);
    }
    for (const figure of figures) (plots.has(figure) ? redraw : start)(figure);
    if (figures.length === 0) document.documentElement.dataset.drawn = "0";
  }

  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = plots.get(target.parentElement);
      if (plot && target.clientWidth > 0 && plot.width !== target.clientWidth) plot.setSize({ width: target.clientWidth, height: 240 });
    }
  });
  document.addEventListener("click", (event) => {
    if (event.target.id !== "reset") return;
    for (const plot of plots.values()) plot.setData(plot.data); // not setScale: the only point of a curve is no range
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => figures.forEach(draw));
  }
  read(document);
  show();

  const MADE_HERE = ".plot, .legend, .log, .numbers, #live";
  const key = (node) => node.dataset?.key ?? (node.id || null);

  /** Makes `old` the same as `fresh` and touches no more than what differs: focus, scrolling and opened parts stay. */
  function renew(old, fresh) {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeName !== fresh.nodeName || old.nodeType !== Node.ELEMENT_NODE) return old.replaceWith(document.importNode(fresh, true));
    for (const { name, value } of fresh.attributes) {
      if (!["open", "hidden", "aria-pressed"].includes(name) && !(name === "aria-label" && old.matches(".log"))) old.setAttribute(name, value);
    }
    if (old.matches(MADE_HERE)) return;
    const keyed = new Map([...old.children].filter(key).map((child) => [key(child), child]));
    let at = old.firstChild;
    for (const child of [...fresh.childNodes]) {
      const own = key(child) ? keyed.get(key(child)) : at && !key(at) && at.nodeName === child.nodeName ? at : null;
      if (!own) {
        old.insertBefore(document.importNode(child, true), at);
        continue;
      }
      if (own === at) at = at.nextSibling;
      else old.insertBefore(own, at);
      renew(own, child);
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  async function follow() {
    const live = document.getElementById("live");
    let tag = "";
    for (let renewed = 0; ; ) {
      await new Promise((resolve) => setTimeout(resolve, 2000));
      if (document.hidden) continue;
      let text = "Follows the runs.";
      try {
        const answer = await fetch(location.href, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
        if (answer.status === 200) {
          const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
          tag = answer.headers.get("ETag");
          read(fresh);
          for (const part of ["header", "main"]) renew(document.querySelector(part), fresh.querySelector(part));
          show();
          document.documentElement.dataset.renewed = String(++renewed);
        } else if (answer.status !== 304) text = `Not current: ${answer.status === 404 ? "another command has taken the port" : await answer.text()}`;
      } catch (error) {
        text = error instanceof TypeError ? "Not current: fsdp-tune report --follow has ended." : `Not current: ${error}`;
      }
      if (live.textContent !== text) live.textContent = text;
    }
  }
  if ("live" in document.documentElement.dataset) follow();
})();
