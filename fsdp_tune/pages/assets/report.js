"use strict";
// Draws the charts of a report from the JSON in the page. The root element says `data-drawn="N"` when all N charts have drawn.
// A page with `data-live` fetches itself again and takes over what is new; `data-renewed="N"` counts how often something was.
(() => {
  let charts = [];
  let figures = [];
  const DASHES = [[], [6, 4], [2, 3]];
  const COLOURS = 8;
  /** Colours repeat after eight, with another dash: 24 curves differ. */
  const stroke = (number) => colour(`--c${number % COLOURS}`);
  const dash = (number) => DASHES[Math.floor(number / COLOURS) % DASHES.length];
  const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const FONT = "12px system-ui, sans-serif";
  const HEIGHT = 240;
  /** Pixels from the cursor within which it takes the step that most curves have. */
  const REACH = 8;
  const SHOWN_ROWS = 14;
  /** A range that leaves out the outermost two percent of each curve at each end is taken if all values need this many times as much. */
  const RUINED = 2.5, OUTER = 0.02;
  const ascending = (one, other) => one - other;
  const plots = new Map();
  const drawn = new Set();
  /** Numbers of the runs that are hidden on the whole page; of a page about one run, fields that are hidden by chart. */
  const hiddenRuns = new Set();
  const hiddenFields = new Map();
  let smoothing = 0;
  let hovered = null;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  /** At most five digits, as an exponent below 1e-3: `0.00002` is `2e-5`. */
  const short = (value) => {
    const rounded = Number(value.toPrecision(5));
    return Math.abs(rounded) >= 1e6 || (rounded !== 0 && Math.abs(rounded) < 1e-3) ? rounded.toExponential().replace("e+", "e") : String(rounded);
  };
  /** What a curve has at a step: a number, "not finite", or "–" if it has no point there. */
  const reading = (value) => (value === undefined ? "–" : value === null ? "not finite" : short(value));

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
  const isHidden = (figure, number) => (chartOf(figure).byRun ? hiddenRuns : hiddenFields.get(figure) ?? new Set()).has(number);
  const isPressed = (figure, name) => figure.querySelector(name).getAttribute("aria-pressed") === "true";

  /** An exponential mean over steps, whose weight halves after a share of all steps; gaps stay gaps. */
  function smoothed(steps, values, share) {
    const half = share * (steps.at(-1) - steps[0]) || 1;
    let mean = null, before = 0, weight = 0;
    return values.map((value, at) => {
      if (value == null) return value;
      const kept = mean === null ? 0 : 0.5 ** ((steps[at] - before) / half);
      before = steps[at];
      mean = (kept * weight * (mean ?? 0) + (1 - kept) * value) / (kept * weight + (1 - kept));
      weight = kept * weight + (1 - kept);
      return mean;
    });
  }
  const isSmoothed = (chart) => chart.smooth && smoothing > 0;
  /** The curves, and if they are smoothed, behind them as they were measured. */
  function drawnData(chart) {
    const [steps, ...values] = chart.data;
    return isSmoothed(chart) ? [steps, ...values, ...values.map((own) => smoothed(steps, own, smoothing))] : chart.data;
  }

  /** The index near the cursor at which most of the shown curves have a point. */
  function snapped(figure, plot, index) {
    const chart = chartOf(figure), [steps, ...values] = chart.data;
    const shown = values.filter((_, at) => !isHidden(figure, chart.series[at].number));
    const x = plot.valToPos(steps[index], "x");
    let best = index, most = -1;
    for (const direction of [0, 1, -1]) {
      for (let at = index + direction; at >= 0 && at < steps.length; at += direction) {
        if (Math.abs(plot.valToPos(steps[at], "x") - x) > REACH) break;
        const count = shown.filter((own) => own[at] !== undefined).length;
        if (count > most) [best, most] = [at, count];
        if (direction === 0) break;
      }
    }
    return best;
  }

  function swatch(number) {
    const made = document.createElement("span");
    made.className = `swatch c${number % COLOURS} d${Math.floor(number / COLOURS) % DASHES.length}`;
    return made;
  }

  /** Shows the step of the cursor and what each curve has at exactly this step. */
  function showReadout(figure, plot) {
    const place = figure.querySelector(".readout"), chart = chartOf(figure);
    const { idx, left } = plot.cursor;
    place.hidden = figure !== hovered || idx == null;
    if (place.hidden) return;
    const at = snapped(figure, plot, idx), step = chart.data[0][at];
    const rows = chart.series
      .map((series, index) => ({ series, value: chart.data[index + 1][at] }))
      .filter(({ series }) => !isHidden(figure, series.number))
      .sort((one, other) => (other.value ?? -Infinity) - (one.value ?? -Infinity));
    const made = document.createElement("table");
    const add = (cells) => {
      const row = made.insertRow();
      for (const cell of cells) row.insertCell().append(...[cell].flat());
    };
    add([`step ${step.toLocaleString("en")}`, ""]);
    for (const { series, value } of rows.slice(0, SHOWN_ROWS)) add([[swatch(series.number), series.label], reading(value)]);
    if (rows.length > SHOWN_ROWS) add([`and ${rows.length - SHOWN_ROWS} more`, ""]);
    for (const mark of chart.marks.filter((each) => each.step === step && !hiddenRuns.has(each.run))) add([`${mark.name} ${mark.label}`, ""]);
    place.replaceChildren(made);
    const isLeft = left < plot.over.clientWidth / 2;
    place.style.left = isLeft ? "" : "4rem";
    place.style.right = isLeft ? "0.5rem" : "";
  }

  function lines(figure) {
    return (plot) => {
      const chart = chartOf(figure);
      const { ctx, bbox } = plot;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      const line = (x0, y0, x1, y1, style, dashes) => {
        ctx.strokeStyle = style;
        ctx.setLineDash(dashes.map((length) => length * devicePixelRatio));
        ctx.beginPath();
        ctx.moveTo(x0, y0);
        ctx.lineTo(x1, y1);
        ctx.stroke();
      };
      ctx.lineWidth = devicePixelRatio;
      ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.textAlign = "left";
      ctx.textBaseline = "alphabetic";
      const named = [];
      const free = [-Infinity, -Infinity, -Infinity]; // where the names in each of three rows end
      for (const mark of chart.marks.filter((each) => !hiddenRuns.has(each.run))) {
        const x = plot.valToPos(mark.step, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        const style = mark.run === null ? colour("--bad") : stroke(mark.run);
        line(x, bbox.top, x, bbox.top + bbox.height, style, [1, 3]);
        const width = ctx.measureText(mark.name).width, gap = 4 * devicePixelRatio;
        const start = x + gap + width > bbox.left + bbox.width ? x - gap - width : x + gap;
        const row = free.findIndex((end) => end < start);
        if (row >= 0) {
          free[row] = start + width + gap;
          ctx.fillStyle = style;
          ctx.fillText(mark.name, start, bbox.top + (12 + 13 * row) * devicePixelRatio);
        }
        named.push({ step: mark.step, name: mark.name, label: mark.label, colour: style, isNamed: row >= 0 });
      }
      figure.dataset.marks = JSON.stringify(named);
      let above = Infinity; // where the last label is: those of equal figures would cover each other
      for (const level of [...chart.levels].sort((one, other) => one.value - other.value).filter((each) => !isHidden(figure, each.number))) {
        const y = plot.valToPos(level.value, "y", true);
        line(bbox.left, y, bbox.left + bbox.width, y, stroke(level.number), [1, 2]);
        if (above - y < 14 * devicePixelRatio) continue;
        above = y;
        ctx.fillStyle = colour("--text");
        ctx.fillText(`${level.label} ${short(level.value)}`, bbox.left + 6, y - 4 * devicePixelRatio);
      }
      ctx.restore();
    };
  }

  /** The values of each shown curve between two steps, ascending, and of each level, which uPlot does not know. */
  function valuesBetween(figure, first, last) {
    const chart = chartOf(figure), [steps, ...values] = drawnData(chart);
    const isShown = (number) => !isHidden(figure, number);
    const levels = chart.levels.filter((level) => isShown(level.number)).map((level) => [level.value]);
    const curves = values.filter((_, index) => isShown(chart.series[index % chart.series.length].number));
    return [...levels, ...curves.map((own) => own.filter((value, at) => value != null && steps[at] >= first && steps[at] <= last).sort(ascending))]
      .filter((own) => own.length > 0);
  }

  /** What an axis must show: of each curve all but its outermost values, and of a curve that leaves the others, such as a run that diverges, what is
      near them. A curve of which a half is elsewhere is shown. */
  function core(curves) {
    const ranges = curves.map((own) => {
      const last = own.length - 1;
      return { low: own[Math.floor(OUTER * last)], high: own[Math.ceil((1 - OUTER) * last)], middle: own[Math.round(last / 2)] };
    });
    const half = (ranges.length - 1) / 2;
    const low = ranges.map((range) => range.low).sort(ascending)[Math.ceil(half)];
    const high = ranges.map((range) => range.high).sort(ascending)[Math.floor(half)];
    const reach = high > low ? RUINED * (high - low) : Infinity;
    return [
      Math.min(...ranges.map((range) => (range.low < low - reach && range.middle >= low - reach ? low : range.low))),
      Math.max(...ranges.map((range) => (range.high > high + reach && range.middle <= high + reach ? high : range.high))),
    ];
  }

  /** Least and greatest value of the axis, and how many are outside of it: values that would flatten the rest. */
  function extent(curves, isEvery) {
    const values = curves.flat();
    const least = Math.min(...curves.map((own) => own[0])), most = Math.max(...curves.map((own) => own.at(-1)));
    const [low, high] = core(curves);
    const room = 0.5 * (high - low);
    const [from, to] = [Math.max(least, low - room), Math.min(most, high + room)];
    const isRuined = to > from && most - least > RUINED * (to - from);
    const outside = isRuined ? values.filter((value) => value < from || value > to).length : 0;
    return isRuined && !isEvery ? [from, to, outside] : [least, most, outside];
  }

  function range(figure, logarithmic) {
    return (plot) => {
      const { min, max } = plot.scales.x;
      const curves = valuesBetween(figure, min ?? -Infinity, max ?? Infinity);
      if (curves.length === 0) return [0, 1];
      const every = figure.querySelector(".every");
      const [low, high, outside] = extent(curves, logarithmic || isPressed(figure, ".every"));
      every.hidden = outside === 0 || logarithmic;
      every.title = `${outside} ${outside === 1 ? "value is" : "values are"} far from the others`;
      if (low === high && !logarithmic) return [low - (0.05 * Math.abs(low) || 1), high + (0.05 * Math.abs(high) || 1)]; // uPlot would begin at 0
      return logarithmic ? uPlot.rangeLog(low, high, 10, true) : uPlot.rangeNum(low, high, 0.08, true);
    };
  }

  const measuring = document.createElement("canvas").getContext("2d");
  /** The width that the labels of an axis need. */
  function labelWidth(plot, labels) {
    measuring.font = FONT;
    return Math.ceil(Math.max(24, ...(labels ?? []).map((label) => measuring.measureText(label).width)) + 18);
  }

  function options(figure, width) {
    const chart = chartOf(figure), logarithmic = isPressed(figure, ".log");
    const grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: colour("--text"), grid, ticks: grid, font: FONT };
    const values = (plot, marks) => {
      const isCompact = marks.some((value) => Math.abs(value) >= 1e4);
      return marks.map((value) => (value == null ? "" : isCompact ? COMPACT.format(value) : short(value)));
    };
    const series = (own, more) => ({
      label: own.label,
      show: !isHidden(figure, own.number),
      stroke: stroke(own.number),
      dash: dash(own.number),
      width: 1.5,
      points: { fill: colour("--background") },
      ...more,
    });
    return {
      width,
      height: HEIGHT,
      cursor: { sync: { key: "steps", scales: ["x", null] }, dataIdx: (plot, _, index) => snapped(figure, plot, index), drag: { x: true, y: false } },
      legend: { show: false },
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1, range: range(figure, logarithmic) } },
      axes: [{ ...axis, values }, { ...axis, values, size: labelWidth }],
      series: [
        {},
        ...(isSmoothed(chart) ? chart.series.map((own) => series(own, { width: 1, alpha: 0.25, points: { show: false } })) : []),
        ...chart.series.map((own) => series(own, {})),
      ],
      hooks: {
        setCursor: [(plot) => showReadout(figure, plot)],
        draw: [lines(figure), (plot) => {
          figure.dataset.axis = JSON.stringify(plot.axes[1]._values);
          figure.dataset.axisRoom = String(plot.axes[1]._size);
          drawn.add(figure);
          if (drawn.size === figures.length) document.documentElement.dataset.drawn = String(drawn.size);
        }],
      },
    };
  }

  function draw(figure) {
    const place = figure.querySelector(".plot"), before = plots.get(figure);
    const zoom = before && !isWhole(before) ? before.scales.x : null;
    before?.destroy();
    const plot = new uPlot(options(figure, place.clientWidth), drawnData(chartOf(figure)), place);
    plots.set(figure, plot);
    if (zoom) plot.setScale("x", { min: zoom.min, max: zoom.max });
    plot.over.addEventListener("pointerenter", () => {
      hovered = figure;
    });
    plot.over.addEventListener("pointerleave", () => {
      hovered = null;
      figure.querySelector(".readout").hidden = true;
    });
  }
  const isWhole = (plot) => plot.scales.x.min <= plot.data[0][0] && plot.scales.x.max >= plot.data[0].at(-1);

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
    const text = (value) => (value === undefined ? "" : value === null ? "not finite" : String(value));
    steps.forEach((step, at) => row(body, "td", [step.toLocaleString("en"), ...values.map((own) => text(own[at]))]));
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
    for (const [name, label] of [[".log", "logarithmic scale"], [".every", "axis for all values"]]) {
      const button = figure.querySelector(name);
      button.setAttribute("aria-label", `${label}: ${chartOf(figure).title}`);
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", String(!isPressed(figure, name)));
        draw(figure);
      });
    }
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
    const plot = plots.get(figure), chart = chartOf(figure), data = drawnData(chart);
    const labels = plot.series.slice(1 + (isSmoothed(chart) ? chart.series.length : 0)).map((series) => series.label);
    if (JSON.stringify(labels) !== JSON.stringify(chart.series.map((series) => series.label))) {
      draw(figure);
    } else {
      const { min, max } = plot.scales.x;
      const wasWhole = isWhole(plot);
      plot.setData(data, wasWhole);
      if (!wasWhole) plot.setScale("x", { min, max });
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
    if (ordered) sortRanking();
    markRuns();
    leaveRoom();
  }

  /** A section that a link leads to begins below the legend, which stays in view. */
  function leaveRoom() {
    document.documentElement.style.scrollPaddingTop = `${(document.getElementById("controls")?.offsetHeight ?? 0) + 12}px`;
  }
  addEventListener("resize", leaveRoom);

  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = plots.get(target.parentElement);
      if (plot && target.clientWidth > 0 && plot.width !== target.clientWidth) plot.setSize({ width: target.clientWidth, height: HEIGHT });
    }
  });

  /** Hides and shows runs on the whole page. */
  function showRuns() {
    markRuns();
    figures.forEach(draw);
  }
  /** In the legend and among the bars, which may be new. */
  function markRuns() {
    for (const button of document.querySelectorAll("#controls .show")) {
      button.setAttribute("aria-pressed", String(!hiddenRuns.has(Number(button.dataset.run))));
    }
    for (const row of document.querySelectorAll(".bar-row")) row.hidden = hiddenRuns.has(Number(row.dataset.run));
  }
  function toggleRun(number) {
    if (!hiddenRuns.delete(number)) hiddenRuns.add(number);
    showRuns();
  }
  function showOnly(number) {
    hiddenRuns.clear();
    for (const button of document.querySelectorAll("#controls .show")) {
      const other = Number(button.dataset.run);
      if (number !== null && other !== number) hiddenRuns.add(other);
    }
    showRuns();
  }
  function toggleField(button) {
    const figure = button.closest("figure"), number = Number(button.dataset.field);
    const hidden = hiddenFields.get(figure) ?? new Set();
    hiddenFields.set(figure, hidden);
    if (!hidden.delete(number)) hidden.add(number);
    button.setAttribute("aria-pressed", String(!hidden.has(number)));
    draw(figure);
  }

  /** The title of the column by which the reader sorts the ranking, and whether the greatest is first. Columns may be inserted later. */
  let ordered = null;
  const titleOf = (heading) => heading.textContent.trim();
  function sortRanking() {
    const table = document.getElementById("ranking");
    if (!table) return;
    const { title, isDown } = ordered;
    const index = [...table.tHead.rows[0].cells].findIndex((cell) => titleOf(cell) === title);
    [...table.tHead.rows[0].cells].forEach((cell, at) => {
      if (at === index) cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    if (index < 0) return; // the column is not in this version of the page
    const isNumber = table.tHead.rows[0].cells[index].classList.contains("number");
    const order = (row) => row.cells[index].dataset.order;
    const compare = (one, other) => (isNumber ? Number(one) - Number(other) : one.localeCompare(other, "en", { numeric: true }));
    const rows = [...table.tBodies[0].rows].sort((one, other) => {
      const [a, b] = [order(one), order(other)];
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined); // unknown ones are last either way
      return isDown ? compare(b, a) : compare(a, b);
    });
    table.tBodies[0].append(...rows);
  }

  document.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (!button) return;
    if (button.id === "reset") {
      for (const plot of plots.values()) plot.setData(plot.data); // not setScale: the only point of a curve is no range
    } else if (button.id === "all-runs") showOnly(null);
    else if (button.matches(".show")) toggleRun(Number(button.dataset.run));
    else if (button.matches(".solo")) showOnly(Number(button.dataset.run));
    else if (button.matches(".field")) toggleField(button);
    else if (button.closest("#ranking th")) {
      const heading = button.closest("th");
      ordered = { title: titleOf(heading), isDown: heading.getAttribute("aria-sort") === "ascending" };
      sortRanking();
    }
  });
  document.addEventListener("change", ({ target }) => {
    if (target.id !== "smoothing") return;
    smoothing = Number(target.value);
    figures.forEach(draw);
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => figures.forEach(draw));
  }
  read(document);
  show();

  const MADE_HERE = ".plot, .readout, .switches, .numbers, #live";
  const key = (node) => node.dataset?.key ?? (node.id || null);

  /** Makes `old` the same as `fresh` and touches no more than what differs: focus, scrolling and opened parts stay. */
  function renew(old, fresh) {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeName !== fresh.nodeName || old.nodeType !== Node.ELEMENT_NODE) return old.replaceWith(document.importNode(fresh, true));
    for (const { name, value } of fresh.attributes) {
      if (!["open", "hidden", "aria-pressed", "aria-sort"].includes(name)) old.setAttribute(name, value);
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
