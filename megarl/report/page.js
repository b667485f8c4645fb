
"use strict";
addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const RUNS = DATA.runs;
  const SEEDS = DATA.seeds || [];
  const SVG = "http://www.w3.org/2000/svg";
  const view = { smooth: 0, time: false, seeds: SEEDS.length > 0 };
  const drawn = new Set();

  // Texts of runs only ever become text nodes: nothing here parses HTML.
  function put(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
    }
    for (const child of children.flat(3)) {
      if (child !== null && child !== undefined && child !== false) element.append(child);
    }
    return element;
  }
  const h = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) => put(document.createElementNS(SVG, tag), attributes, children);
  const color = (index) => "k" + (index % 8);
  // Common phases first, so that they have the same colours in every report. Each phase has a colour of its own.
  const PHASES = [...new Set(["rollout", "train", "logprobs", "reshard", "evaluation", "checkpoint", "start", "other",
    ...RUNS.flatMap((run) => Object.keys(run.phases ? run.phases.total : {})).sort()])];
  const PHASE_COLORS = 16;
  const hue = (phase) => "p" + (PHASES.indexOf(phase) % PHASE_COLORS);
  const phaseChip = (phase) => h("span", { class: "chip " + hue(phase) });
  const chip = (index) => h("span", { class: "chip " + color(index) });
  const isNumber = (value) => typeof value === "number" && isFinite(value);

  function fmt(value) {
    if (!isNumber(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
  }
  function duration(seconds) {
    if (!isNumber(seconds)) return "–";
    if (seconds < 60) return fmt(seconds) + " s";
    if (seconds < 3600) return Math.floor(seconds / 60) + " min " + Math.round(seconds % 60) + " s";
    if (seconds < 172800) return Math.floor(seconds / 3600) + " h " + Math.round((seconds % 3600) / 60) + " min";
    return fmt(seconds / 86400) + " d";
  }
  const short = (seconds) =>
    seconds < 100 ? fmt(seconds) + " s" : seconds < 6000 ? fmt(seconds / 60) + " min" : fmt(seconds / 3600) + " h";

  // Curves

  function curve(run, metric) {
    const found = run.series.of[metric];
    if (!found) return null;
    const at = found.i || found.y.map((_, index) => index);
    const x = at.map((index) => (view.time ? run.series.seconds : run.series.x)[index]);
    return { x, step: at.map((index) => run.series.x[index]), y: found.y, low: found.low, high: found.high };
  }
  function smoothed(values, weight) {
    let mean = 0;
    let norm = 0;
    return values.map((value) => {
      if (!isNumber(value)) return value;
      mean = weight * mean + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return mean / norm;
    });
  }
  function ticks(low, high, count) {
    const span = high - low || 1;
    const raw = span / count;
    const power = Math.pow(10, Math.floor(Math.log10(raw)));
    const step = [1, 2, 5, 10].map((part) => part * power).find((part) => part >= raw * 0.7) || raw;
    const found = [];
    for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) {
      found.push(Math.abs(tick) < step * 1e-6 ? 0 : tick);
    }
    return found;
  }
  function decades(low, high) {
    const first = Math.ceil(Math.log10(low) - 1e-9);
    const last = Math.floor(Math.log10(high) + 1e-9);
    const every = Math.max(1, Math.ceil((last - first + 1) / 4));
    const found = [];
    for (let power = first; power <= last; power += every) found.push(Math.pow(10, power));
    return found;
  }
  function path(points) {
    let text = "";
    let down = false;
    for (const [x, y] of points) {
      if (!isNumber(y)) { down = false; continue; }
      text += (down ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1);
      down = true;
    }
    return text;
  }
  function bandPath(x, low, high) {
    const parts = [];
    let open = [];
    const close = () => {
      if (open.length > 1) {
        const back = open.slice().reverse();
        parts.push("M" + open.map((p) => p[0].toFixed(1) + " " + p[1].toFixed(1)).join("L") +
          "L" + back.map((p) => p[0].toFixed(1) + " " + p[2].toFixed(1)).join("L") + "Z");
      }
      open = [];
    };
    x.forEach((at, index) => {
      if (isNumber(low[index]) && isNumber(high[index])) open.push([at, low[index], high[index]]);
      else close();
    });
    close();
    return parts.join("");
  }

  // Lines of each chart: one per run. Runs differing only in their seed are replaced by their mean.
  function drawnRuns() {
    const all = RUNS.map((run, index) => ({ run, index, label: run.label }));
    if (!view.seeds) return all;
    const grouped = new Set(SEEDS.flatMap((group) => group.runs));
    return [...SEEDS.map((group) => ({ run: group, index: group.runs[0], label: group.label })),
      ...all.filter(({ index }) => !grouped.has(index))];
  }

  function plot(holder, chart) {
    const lines = [];
    drawnRuns().forEach(({ run, index }) => {
      const main = curve(run, chart.metric);
      if (!main || !main.y.some(isNumber)) return;
      const line = { index, run, ...main, smooth: view.smooth ? smoothed(main.y, view.smooth) : main.y };
      // Next to a band over seeds, the band of a single run's samples would be misread as one over seeds.
      const spread = chart.spread && !view.seeds && curve(run, chart.spread);
      if (spread && spread.y.length === main.y.length) {
        const centre = line.smooth;
        const wide = view.smooth ? smoothed(spread.y, view.smooth) : spread.y;
        line.low = centre.map((y, i) => (isNumber(y) && isNumber(wide[i]) ? y - wide[i] : null));
        line.high = centre.map((y, i) => (isNumber(y) && isNumber(wide[i]) ? y + wide[i] : null));
      }
      const upper = chart.upper && curve(run, chart.upper);
      if (upper && upper.y.some(isNumber)) line.upper = upper;
      lines.push(line);
    });
    holder.replaceChildren();
    if (!lines.length) {
      holder.append(h("p", { class: "soft" }, "no finite value"));
      return;
    }
    const width = Math.max(200, holder.clientWidth || 320);
    const height = chart.height || 158;
    const values = lines.flatMap((line) =>
      [line.y, line.low || [], line.high || [], line.upper ? line.upper.y : []].flat().filter(isNumber));
    const positive = values.filter((value) => value > 0);
    const isLog = /logprob_gap\/(mean|max|k3)|learning_rate/.test(chart.metric) && positive.length > 0 &&
      values.every((value) => value >= 0) && Math.max(...positive) / Math.min(...positive) > 12;
    let low = values.reduce((a, b) => Math.min(a, b), Infinity);
    let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (isLog) low = positive.reduce((a, b) => Math.min(a, b), Infinity);
    if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; if (isLog) { low = high / 10; } }
    else if (!isLog) { const pad = (high - low) * 0.06; low = low >= 0 && low - pad < 0 ? 0 : low - pad; high += pad; }
    const marks = isLog ? decades(low, high) : ticks(low, high, 4);
    const left = 8 + 6.2 * Math.max(3, ...marks.map((mark) => fmt(mark).length));
    const right = 8;
    const bottom = 20;
    const top = 6;
    const xs = lines.flatMap((line) => line.x.concat(line.upper ? line.upper.x : []));
    let first = xs.reduce((a, b) => Math.min(a, b), Infinity);
    let last = xs.reduce((a, b) => Math.max(a, b), -Infinity);
    if (first === last) { first -= 0.5; last += 0.5; }
    const px = (x) => left + ((x - first) / (last - first)) * (width - left - right);
    const scale = isLog ? (value) => (value > 0 ? Math.log10(value) : null) : (value) => value;
    const [a, b] = [scale(low), scale(high)];
    const py = (value) => {
      if (!isNumber(value)) return null;
      const at = scale(value);
      return at === null ? null : height - bottom - ((at - a) / (b - a)) * (height - top - bottom);
    };
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": chart.metric });
    for (const mark of marks) {
      const y = py(mark);
      svg.append(s("line", { class: "gridline", x1: left, x2: width - right, y1: y, y2: y }),
        s("text", { x: left - 6, y: y + 3.5, "text-anchor": "end" }, fmt(mark)));
    }
    const along = ticks(first, last, width < 300 ? 3 : 5).filter((tick) => view.time || Number.isInteger(tick));
    for (const mark of along) {
      if (mark < first || mark > last) continue;
      svg.append(s("text", { x: px(mark), y: height - 5, "text-anchor": "middle" }, view.time ? short(mark) : fmt(mark)));
    }
    svg.append(s("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    if (isLog) svg.append(s("text", { x: left + 4, y: height - bottom - 5 }, "log"));
    for (const line of lines) {
      const at = line.x.map(px);
      if (line.low) {
        svg.append(s("path", { class: "band " + color(line.index), d: bandPath(at, line.low.map(py), line.high.map(py)) }));
      }
      if (line.upper) {
        const points = line.upper.x.map((x, i) => [px(x), py(line.upper.y[i])]);
        svg.append(s("path", { class: "curve thin " + color(line.index), d: path(points) }));
      }
      if (view.smooth) {
        svg.append(s("path", { class: "curve raw " + color(line.index), d: path(at.map((x, i) => [x, py(line.y[i])])) }));
      }
      svg.append(s("path", { class: "curve " + color(line.index), d: path(at.map((x, i) => [x, py(line.smooth[i])])) }));
      if (line.y.filter(isNumber).length <= 24) {
        line.smooth.forEach((value, i) => {
          if (isNumber(py(value))) svg.append(s("circle", { class: "dot " + color(line.index), cx: at[i], cy: py(value), r: 2.2 }));
        });
      }
    }
    const cross = s("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    svg.append(cross);
    const tip = h("div", { class: "tip", hidden: "" });
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = first + (((event.clientX - box.left) * (width / box.width) - left) / (width - left - right)) * (last - first);
      const rows = [];
      let place = null;
      for (const line of lines) {
        let best = 0;
        line.x.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(line.x[best] - x)) best = i; });
        if (place === null || Math.abs(line.x[best] - x) < Math.abs(place - x)) place = line.x[best];
        const thin = line.upper ? " (" + fmt(line.upper.y[best]) + ")" : "";
        rows.push(h("div", {}, chip(line.index), "step " + fmt(line.step[best]) + "  ", h("b", {}, fmt(line.y[best])), thin));
      }
      cross.setAttribute("x1", px(place));
      cross.setAttribute("x2", px(place));
      cross.setAttribute("visibility", "visible");
      tip.replaceChildren(...rows);
      tip.hidden = false;
      const share = px(place) / width;
      tip.style.left = share < 0.5 ? share * 100 + 3 + "%" : "auto";
      tip.style.right = share < 0.5 ? "auto" : (1 - share) * 100 + 3 + "%";
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); });
    holder.append(svg, tip);
  }

  function chartCard(chart) {
    const holder = h("div", { class: "plot" });
    const lasts = h("span", { class: "lasts" });
    const draw = () => {
      lasts.replaceChildren(...drawnRuns().map(({ run, index }) => {
        const found = run.series.of[chart.metric];
        const known = found ? found.y.filter(isNumber) : [];
        return known.length ? h("span", { class: "last ink " + color(index) }, fmt(known[known.length - 1])) : "";
      }));
      plot(holder, chart);
    };
    drawn.add(draw);
    holder.redraw = draw;
    const title = h("h3", chart.title === chart.metric ? { class: "name" } : {}, chart.title);
    const meaning = chart.meaning && h("div", { class: "meaning" }, chart.meaning + " · ", h("span", { class: "name" }, chart.metric));
    return h("div", { class: "card" }, h("div", { class: "head" }, title, lasts), meaning, holder);
  }
  const visible = (element) => element.isConnected && element.offsetParent !== null;
  function redraw(root) {
    for (const holder of (root || document).querySelectorAll(".plot")) {
      if (holder.redraw && visible(holder)) holder.redraw();
    }
  }
  function segment(label, options, chosen, act) {
    const buttons = options.map(([text, value]) =>
      h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: (event) => {
        buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === event.currentTarget)));
        act(value);
      } }, text));
    return h("span", { class: "seg", role: "group", "aria-label": label }, h("span", {}, label), buttons);
  }

  // Parts of the page

  const sections = [];
  function section(id, title, lead, ...children) {
    sections.push([id, title]);
    return h("section", { id }, h("h2", {}, title), lead && h("p", { class: "lead" }, lead), children);
  }
  const empty = (text) => h("p", { class: "empty" }, text);
  function legend() {
    const holder = h("div", { class: "legend plot" });
    holder.redraw = () => holder.replaceChildren(...drawnRuns().map(({ index, label }) => h("span", {}, chip(index), label)));
    holder.redraw();
    return RUNS.length > 1 && holder;
  }
  const column = (run, metric) => (run.series.of[metric] ? run.series.of[metric].y.filter(isNumber) : []);
  const arrow = (values) =>
    values.length > 1 ? fmt(values[0]) + " → " + fmt(values[values.length - 1]) : values.length ? fmt(values[0]) : null;
  const mean = (values) => {
    const known = values.filter(isNumber);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };
  const median = (values) => values.slice().sort((a, b) => a - b)[Math.floor(values.length / 2)];

  function state(run) {
    return h("span", { class: "state " + run.state.split(" ")[0] }, run.state);
  }
  function overview() {
    const logged = [...new Set(RUNS.flatMap((run) => Object.keys(run.series.of)))].sort();
    const accuracies = logged.filter((name) => /^val\/[^/]+\/accuracy$/.test(name))
      .map((name) => [name, "accuracy, " + name.slice(4, -"/accuracy".length)]);
    const rewards = logged.filter((name) => /^val\/[^/]+\/reward\/mean$/.test(name))
      .map((name) => [name, "held-out reward, " + name.slice(4, -"/reward/mean".length)]);
    const heldout = [...accuracies, ...rewards];
    const of = (name) => (run) => arrow(column(run, name));
    const rows = [
      ["state", state],
      ["step", (run) => fmt(run.step) + (run.steps ? " of " + fmt(run.steps) : "")],
      ["training time", (run) => (run.series.seconds.length ? duration(run.series.seconds[run.series.seconds.length - 1]) : null)],
      ["loop", (run) => run.loop || null],
      ["model", (run) => run.model || null],
      ["fork of", (run) => run.parent || null],
      ["reward", of("reward/mean")],
      ...heldout.map(([name, label]) => [label, of(name)]),
      ["completion tokens", of("rollout/completion_tokens/mean")],
      ["loss", of("train/loss")],
      ["largest log-prob gap", (run) => {
        const found = run.series.of["logprob_gap/max"];
        const values = found ? (found.high || found.y).filter(isNumber) : [];
        return values.length ? fmt(values.reduce((a, b) => Math.max(a, b))) + " nats" : null;
      }],
      ["tokens per second", (run) => {
        const chart = DATA.charts.find((one) => one.title.startsWith("Tokens per second"));
        const values = chart ? column(run, chart.metric) : [];
        return values.length ? fmt(median(values)) + " (median)" : null;
      }],
      ["starts", (run) => (run.attempts.length ? fmt(run.attempts.length) : null)],
      ["health", (run) => (run.health.length ? run.health.map((line) => h("div", {}, line)) : null)],
      ["why it ended", (run) => run.cause || null],
    ];
    const body = rows.map(([name, value]) => [name, RUNS.map(value)]).filter(([, cells]) => cells.some((cell) => cell !== null));
    const notes = RUNS.flatMap((run) => run.notes.map((note) => (RUNS.length > 1 ? run.label + ": " : "") + note));
    const table = h("table", {},
      RUNS.length > 1 && h("thead", {}, h("tr", {}, h("th"), RUNS.map((run, index) => h("th", {}, chip(index), run.label)))),
      h("tbody", {}, body.map(([name, cells]) =>
        h("tr", {}, h("th", { scope: "row" }, name), cells.map((cell) => h("td", {}, cell === null ? "–" : cell))))));
    const told = [["reward/mean", "reward"], ...heldout, ["train/loss", "loss"]]
      .filter(([name]) => SEEDS.some((group) => group.series.final[name]));
    const overSeeds = SEEDS.length > 0 && told.length > 0 && h("div", { class: "card scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "last value, mean ± deviation over seeds"), SEEDS.map((group) => h("th", {}, chip(group.runs[0]), group.label)))),
      h("tbody", {}, told.map(([name, word]) => h("tr", {}, h("th", { scope: "row" }, word), SEEDS.map((group) => {
        const [average, spread, count] = group.series.final[name] || [];
        if (average === undefined) return h("td", {}, "–");
        return h("td", {}, count > 1 ? `${fmt(average)} ± ${fmt(spread)} (${count} runs)` : `${fmt(average)} (1 run)`);
      }))))));
    return section("overview", "Overview", null, h("div", { class: "card scroll" }, table), overSeeds,
      notes.map((note) => h("p", { class: "note" }, note)));
  }
  function curvesPart() {
    const thinned = RUNS.filter((run) => run.series.is_thinned);
    const lead = thinned.length
      ? `Long runs are thinned out to ${DATA.points} points: each is the mean of its steps, the band of an important ` +
        "curve reaches from the least to the largest. metrics.jsonl has every step."
      : null;
    if (!DATA.charts.length) {
      return section("curves", "Curves", null, empty(RUNS.length > 1
        ? "None of these runs has logged a step yet. Curves appear with the first."
        : "This run has not logged a step yet. Curves appear with the first."));
    }
    const choose = h("div", { class: "bar" },
      segment("smoothing", [["none", 0], ["light", 0.6], ["strong", 0.9]], view.smooth, (value) => { view.smooth = value; redraw(); }),
      segment("against", [["step", false], ["training time", true]], view.time, (value) => { view.time = value; redraw(); }),
      SEEDS.length > 0 && segment("lines", [["mean over seeds", true], ["each run", false]], view.seeds, (value) => { view.seeds = value; redraw(); }));
    const ofSeeds = SEEDS.length > 0 && h("p", { class: "lead" }, "Runs whose recipes differ in the seed alone are one line, their mean; " +
      "the band is one standard deviation over seeds.");
    return section("curves", "Curves", lead, ofSeeds, legend(), choose, h("div", { class: "grid" }, DATA.charts.map(chartCard)));
  }
  function allMetrics() {
    const groups = new Map();
    for (const run of RUNS) {
      for (const name of Object.keys(run.series.of)) {
        const group = name.includes("/") ? name.split("/")[0] : "other";
        if (!groups.has(group)) groups.set(group, new Set());
        groups.get(group).add(name);
      }
    }
    if (!groups.size) return null;
    const place = (group) => (DATA.groups.includes(group) ? DATA.groups.indexOf(group) : DATA.groups.length);
    const names = [...groups.keys()].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
    return section("metrics", "All metrics", "By group, as metrics.jsonl names them.", names.map((group) => {
      const metrics = [...groups.get(group)];
      const body = h("div", { class: "body grid" });
      return h("details", { ontoggle: (event) => {
        if (!event.currentTarget.open) return;
        if (!body.childElementCount) body.append(...metrics.map((metric) => chartCard({ title: metric, metric, height: 130 })));
        redraw(body);
      } }, h("summary", {}, group + "/", h("span", { class: "soft" }, metrics.length)), body);
    }));
  }

  const phaseTotals = (phases) => phases.x.map((_, i) =>
    Object.values(phases.of).reduce((sum, seconds) => sum + seconds[i], 0));
  // The seconds that a chart of phases must show. Steps up to the first training step include the start of ranks and
  // engines: they are cut off at the top if they are much longer than the others.
  function phaseScale(phases) {
    const totals = phaseTotals(phases);
    const first = phases.x.find((step) => step > 0);
    const later = totals.filter((_, i) => phases.x[i] > first).reduce((a, b) => Math.max(a, b), 0);
    const longest = totals.reduce((a, b) => Math.max(a, b), 0);
    return later > 0 && longest > 2 * later ? 1.15 * later : longest;
  }
  function stacked(holder, phases) {
    const names = Object.keys(phases.of);
    holder.replaceChildren();
    const width = Math.max(200, holder.clientWidth || 400);
    const height = 170;
    const totals = phaseTotals(phases);
    // One scale for all runs, so that their heights can be compared.
    const high = Math.max(...RUNS.map((run) => phaseScale(run.phases))) || 1;
    const cut = totals.findIndex((seconds) => seconds > high);
    const marks = ticks(0, high, 4);
    const left = 8 + 6.2 * Math.max(3, ...marks.map((mark) => short(mark).length));
    const bottom = 20;
    const top = 6;
    const py = (value) => height - bottom - (Math.min(value, high) / high) * (height - top - bottom);
    const step = (width - left - 8) / phases.x.length;
    const gap = step > 5 ? 1 : 0;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "seconds of a step by phase" });
    for (const mark of marks) {
      svg.append(s("line", { class: "gridline", x1: left, x2: width - 8, y1: py(mark), y2: py(mark) }),
        s("text", { x: left - 6, y: py(mark) + 3.5, "text-anchor": "end" }, short(mark)));
    }
    const base = phases.x.map(() => 0);
    names.forEach((name) => {
      const parts = phases.x.map((_, i) => {
        const from = base[i];
        base[i] += phases.of[name][i];
        const size = py(from) - py(base[i]);
        if (size < 0.05) return "";
        return `M${(left + i * step).toFixed(1)} ${py(base[i]).toFixed(1)}h${Math.max(0.6, Math.min(step - gap, 46)).toFixed(1)}v${size.toFixed(1)}h-${Math.max(0.6, Math.min(step - gap, 46)).toFixed(1)}z`;
      });
      svg.append(s("path", { class: "fill " + hue(name), d: parts.join("") }));
    });
    const every = Math.max(1, Math.ceil(phases.x.length / Math.max(2, Math.floor((width - left) / 60))));
    phases.x.forEach((x, i) => {
      if (i % every === 0) {
        svg.append(s("text", { x: left + i * step + Math.min(step, 46) / 2, y: height - 5, "text-anchor": "middle" }, fmt(x)));
      }
    });
    if (cut >= 0) {
      const beside = left + cut * step + Math.min(step, 46) + 4;
      svg.append(s("text", { x: beside, y: top + 8 }, `step ${fmt(phases.x[cut])}: ${duration(totals[cut])}, cut off`));
    }
    const tip = h("div", { class: "tip", hidden: "" });
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const i = Math.max(0, Math.min(phases.x.length - 1, Math.floor(((event.clientX - box.left) * (width / box.width) - left) / step)));
      tip.replaceChildren(h("div", {}, h("b", {}, "step " + fmt(phases.x[i])), "  " + duration(totals[i])),
        ...names.map((name) => h("div", {}, phaseChip(name), name + "  " + duration(phases.of[name][i]))));
      tip.hidden = false;
      const share = (left + i * step) / width;
      tip.style.left = share < 0.5 ? share * 100 + 4 + "%" : "auto";
      tip.style.right = share < 0.5 ? "auto" : (1 - share) * 100 + 4 + "%";
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    holder.append(svg, tip);
  }
  function timePart() {
    const cards = RUNS.map((run, index) => {
      const names = Object.keys(run.phases.total);
      if (!names.length) return null;
      const all = names.reduce((sum, name) => sum + run.phases.total[name], 0);
      const holder = h("div", { class: "plot" });
      holder.redraw = () => stacked(holder, run.phases);
      const bar = h("div", { class: "share", role: "img", "aria-label": "shares of the phases" }, names.map((name) => {
        const part = h("i", { class: hue(name), title: name });
        part.style.flexGrow = run.phases.total[name] / all;
        return part;
      }));
      const shares = h("div", { class: "legend" }, names.map((name) =>
        h("span", {}, phaseChip(name), name + " ", h("span", { class: "soft" },
          duration(run.phases.total[name]) + ", " + fmt(100 * run.phases.total[name] / all) + " %"))));
      const told = run.phases.per_column > 1 ? `mean seconds of a step; a column is up to ${run.phases.per_column} steps` : "seconds of each step";
      return h("div", { class: "card" },
        h("div", { class: "head" }, h("h3", {}, RUNS.length > 1 ? [chip(index), run.label] : "Phases of a step"),
          h("span", { class: "last" }, duration(all))),
        h("div", { class: "meaning" }, told), bar, shares, holder);
    }).filter(Boolean);
    return section("time", "Time by phase", null, cards.length ? h("div", { class: RUNS.length > 1 ? "pair" : "" }, cards)
      : empty("No step was timed yet."));
  }

  function heat(holder, found, index) {
    holder.replaceChildren();
    const width = Math.max(200, holder.clientWidth || 360);
    const height = 150;
    const labels = found.values || found.edges;
    const rows = found.values ? found.values.length : found.edges.length - 1;
    const left = 8 + 6.2 * Math.max(3, ...labels.map((label) => fmt(label).length));
    const bottom = 20;
    const cell = (height - bottom - 4) / rows;
    const step = (width - left - 8) / found.steps.length;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "histogram by step" });
    found.counts.forEach((counts, i) => {
      const sum = counts.reduce((a, b) => a + b, 0) || 1;
      counts.forEach((count, row) => {
        if (!count) return;
        const rect = s("rect", { class: "fill " + color(index), x: left + i * step, y: 4 + (rows - 1 - row) * cell,
          width: Math.max(0.5, step - (step > 4 ? 1 : 0)), height: Math.max(0.5, cell - (cell > 4 ? 1 : 0)),
          opacity: (0.12 + 0.88 * Math.sqrt(count / sum)).toFixed(2) },
        s("title", {}, `step ${found.steps[i]}: ${count} of ${sum} ` +
          (found.values ? `at ${fmt(found.values[row])}` : `from ${fmt(found.edges[row])} to ${fmt(found.edges[row + 1])}`)));
        svg.append(rect);
      });
    });
    const few = found.values ? found.values.map((value, row) => [value, row + 0.5]) : [[found.edges[0], 0.3], [found.edges[rows >> 1], rows >> 1], [found.edges[rows], rows - 0.3]];
    for (const [value, row] of few) {
      svg.append(s("text", { x: left - 6, y: 4 + (rows - row) * cell + 3.5, "text-anchor": "end" }, fmt(value)));
    }
    const every = Math.max(1, Math.ceil(found.steps.length / Math.max(2, Math.floor((width - left) / 50))));
    found.steps.forEach((x, i) => {
      if (i % every === 0) svg.append(s("text", { x: left + (i + 0.5) * step, y: height - 5, "text-anchor": "middle" }, fmt(x)));
    });
    holder.append(svg);
  }
  function spreadPart() {
    const kinds = [["rewards", "Rewards"], ["lengths", "Completion tokens"]];
    const cards = kinds.flatMap(([kind, title]) => RUNS.map((run, index) => {
      const found = run.samples[kind];
      if (!found || !found.steps) return null;
      const holder = h("div", { class: "plot" });
      holder.redraw = () => heat(holder, found, index);
      return h("div", { class: "card" }, h("div", { class: "head" }, h("h3", {}, title),
        RUNS.length > 1 && h("span", { class: "soft" }, chip(index), run.label)), h("div", { class: "meaning" },
        "a column is a step's recorded samples, the stronger the colour, the more of them"), holder);
    })).filter(Boolean);
    if (!cards.length) return null;
    const few = RUNS.filter((run) => run.samples.read < run.samples.there);
    const lead = few.length
      ? "Made from " + few.map((run) => `${run.samples.read} of the ${run.samples.there} recorded steps of ${run.label}`).join(", ") + ", evenly spread."
      : null;
    return section("spread", "Rewards and lengths", lead, h("div", { class: "pair" }, cards));
  }

  // Samples

  function said(role, text, kind) {
    return h("div", { class: "said " + kind }, role && h("span", { class: "role" }, role), h("div", { class: "text" }, text === "" ? "(empty)" : text));
  }
  const isShort = (answer) => answer !== undefined && answer.length <= 48 && !answer.includes("\n");
  const longAnswer = (sample) =>
    sample.answer !== undefined && !isShort(sample.answer) && said("right answer", sample.answer, "prompt");
  function facts(sample) {
    const right = sample.answer_correct;
    return h("div", { class: "facts" },
      sample.step !== undefined && h("span", {}, "step ", h("b", {}, sample.step)),
      sample.reward !== undefined && h("span", {}, "reward ", h("b", {}, fmt(sample.reward))),
      sample.samples !== undefined && h("span", {}, `one of ${fmt(sample.samples)} samples, mean ${DATA.evaluations ? "accuracy" : "reward"} `, h("b", {}, fmt(sample.mean))),
      right !== undefined && h("span", { class: right ? "good" : "bad" }, right ? "right" : "wrong"),
      sample.tokens !== undefined && h("span", {}, fmt(sample.tokens) + " tokens"),
      sample.finish_reason && h("span", {}, "ended: " + sample.finish_reason),
      sample.set && h("span", {}, "set " + sample.set),
      sample.source && h("span", {}, sample.source),
      sample.reward_failure && h("span", { class: "bad" }, sample.reward_failure),
      isShort(sample.answer) && h("span", {}, "right answer ", h("b", {}, sample.answer)),
      sample.line !== undefined && h("span", {}, "line " + sample.line));
  }
  function turns(sample) {
    const shown = sample.turns;
    return shown.map((turn, place) => h("div", { class: "turn" },
      place > 0 && turn.number > shown[place - 1].number + 1
        && said("", `[... ${turn.number - shown[place - 1].number - 1} turns left out ...]`, ""),
      said("turn " + turn.number + (turn.reward !== undefined ? ", reward " + fmt(turn.reward) : ""), turn.completion, "answer"),
      h("div", { class: "seen" }, turn.observation.map((message) => said(message.role || "environment", message.text, "")))));
  }
  function sampleCard(sample) {
    return h("div", { class: "card" }, facts(sample),
      sample.prompt.map((message) => said(message.role, message.text, "prompt")),
      sample.turns ? turns(sample) : said("completion", sample.completion, "answer"),
      longAnswer(sample));
  }
  function changedCard(pair) {
    const side = (sample) => h("div", {}, facts(sample), sample.turns ? turns(sample) : said("completion", sample.completion, "answer"));
    return h("div", { class: "card" },
      pair.after.prompt.map((message) => said(message.role, message.text, "prompt")),
      h("div", { class: "pair" }, side(pair.before), side(pair.after)),
      longAnswer(pair.after));
  }

  const FIRST = 8;
  const MODES = [
    ["advantage", "advantage", "push of the update: up is blue, down is orange"],
    ["gap", "log-prob gap", "|trainer - engine| in nats"],
    ["surprise", "surprise", "-log-prob of the engine in nats"],
    ["weight_version", "weight version", "each version a colour of its own"],
    ["turn", "turn", "each model call a colour of its own"],
  ];
  function tokenValues(columns, mode) {
    if (mode === "gap") {
      if (columns.logprob_gap) return columns.logprob_gap.map((value) => (isNumber(value) ? Math.abs(value) : null));
      if (!columns.trainer_logprob || !columns.rollout_logprob) return null;
      return columns.trainer_logprob.map((value, i) =>
        isNumber(value) && isNumber(columns.rollout_logprob[i]) ? Math.abs(value - columns.rollout_logprob[i]) : null);
    }
    if (mode === "surprise") return columns.rollout_logprob && columns.rollout_logprob.map((value) => (isNumber(value) ? -value : null));
    return columns[mode] || null;
  }
  const largest = (values) => values.filter(isNumber).reduce((a, b) => Math.max(a, Math.abs(b)), 0);
  function tokenCard(sample, mode, most) {
    const columns = sample.columns;
    const values = tokenValues(columns, mode) || columns.text.map(() => null);
    const kinds = [...new Set(values.filter(isNumber))].sort((a, b) => a - b);
    const line = h("span", { class: "tokenline" });
    const told = [["advantage", "advantage"], ["rollout_logprob", "engine"], ["trainer_logprob", "trainer"], ["logprob_gap", "gap"],
      ["reference_logprob", "reference"], ["weight_version", "version"], ["turn", "turn"]];
    const describe = (i) => told.filter(([name]) => columns[name] && isNumber(columns[name][i]))
      .map(([name, word]) => word + " " + (name === "turn" ? columns[name][i] + 1 : fmt(columns[name][i]))).join(" · ");
    const spans = columns.text.map((text, i) => {
      const value = values[i];
      const sampled = !columns.rollout_logprob || isNumber(columns.rollout_logprob[i]);
      const span = h("span", { class: sampled ? null : "other", "data-i": i }, text.replace(/\n/g, "↵\n"));
      if (isNumber(value) && most > 0) {
        const part = Math.min(1, Math.abs(value) / most);
        const share = Math.round(6 + 44 * (mode === "advantage" ? part : Math.sqrt(part)));
        if (mode === "weight_version" || mode === "turn") {
          span.style.backgroundColor = `color-mix(in srgb, var(--c${kinds.indexOf(value) % 8}) 28%, transparent)`;
        } else {
          const hue = mode === "advantage" ? (value >= 0 ? "--pos" : "--neg") : "--hot";
          span.style.backgroundColor = value === 0 ? "transparent" : `color-mix(in srgb, var(${hue}) ${share}%, transparent)`;
        }
      } else if (isNumber(value) && (mode === "weight_version" || mode === "turn")) {
        span.style.backgroundColor = "color-mix(in srgb, var(--c0) 28%, transparent)";
      }
      return span;
    });
    const half = Math.ceil(spans.length / 2);
    const body = sample.cut
      ? [spans.slice(0, half), h("span", { class: "other" }, `\n[... ${sample.cut} tokens left out ...]\n`), spans.slice(half)]
      : spans;
    const block = h("div", { class: "text tokens", onpointerover: (event) => {
      const at = event.target.dataset && event.target.dataset.i;
      if (at !== undefined) line.textContent = describe(Number(at));
    } }, body);
    const range = mode === "weight_version" || mode === "turn"
      ? kinds.map((kind, i) => h("span", {}, chip(i), mode === "turn" ? kind + 1 : kind))
      : h("span", { class: "scale" }, mode === "advantage" ? `${fmt(mean(values))} on average` : `up to ${fmt(largest(values))}`);
    return h("div", { class: "card" }, facts(sample), sample.prompt.map((message) => said(message.role, message.text, "prompt")),
      h("div", { class: "said answer" }, h("span", { class: "role" }, "completion, ", range, "  ", line), block),
      longAnswer(sample));
  }
  function samplesPart() {
    const having = RUNS.map((run, index) => [run, index]).filter(([run]) => run.samples.there > 0 || run.samples.tokens.length);
    if (!having.length) {
      const isRl = RUNS.some((run) => run.loop === "rl" || !run.loop);
      return section("samples", "Samples", null, empty(isRl
        ? "No samples were recorded yet: they come with the first evaluation and the first step."
        : "No samples were recorded: they come with evaluations that sample, and with rl."));
    }
    const kinds = [["tokens", "token by token"], ["best", "best"], ["worst", "worst"], ["changed", "most changed"], ["turns", "turn by turn"]];
    const leads = {
      tokens: "Samples of a step as the update saw them. Point at a token to read its numbers.",
      best: "Samples of training with the highest rewards of a step, newest step first, one of each prompt.",
      worst: "Samples of training with the lowest rewards of a step, newest step first, one of each prompt.",
      changed: "Held-out problems at the first and at the last evaluation, those first whose mean rewards changed most.",
      turns: "Attempts of several turns: each completion, its reward, and what the environment replied.",
    };
    const chosen = { run: having[0][1], kind: null, mode: "advantage" };
    const list = h("div", { class: "samples" });
    const bar = h("div", { class: "bar" });
    const lead = h("p", { class: "lead" });
    const show = () => {
      const run = RUNS[chosen.run];
      const there = kinds.filter(([kind]) => run.samples[kind].length);
      if (!there.some(([kind]) => kind === chosen.kind)) chosen.kind = there.length ? there[0][0] : null;
      const switches = [];
      if (having.length > 1) {
        switches.push(segment("run", having.map(([one, index]) => [[chip(index), one.label], index]), chosen.run, (value) => { chosen.run = value; show(); }));
      }
      if (there.length) {
        switches.push(segment("show", there.map(([kind, text]) => [text, kind]), chosen.kind, (value) => { chosen.kind = value; show(); }));
      }
      const items = chosen.kind ? run.samples[chosen.kind] : [];
      let cards = [];
      let told = leads[chosen.kind] || "";
      if (chosen.kind === "tokens") {
        const modes = MODES.filter(([mode]) => items.some((item) => (tokenValues(item.columns, mode) || []).some(isNumber)));
        if (!modes.some(([mode]) => mode === chosen.mode) && modes.length) chosen.mode = modes[0][0];
        switches.push(segment("colour", modes.map(([mode, text]) => [text, mode]), chosen.mode, (value) => { chosen.mode = value; show(); }));
        told += " Colour: " + (MODES.find(([mode]) => mode === chosen.mode) || ["", "", "none"])[2] + ".";
        const most = items.reduce((a, item) => Math.max(a, largest(tokenValues(item.columns, chosen.mode) || [])), 0);
        cards = items.map((item) => tokenCard(item, chosen.mode, most));
      } else if (chosen.kind === "changed") {
        const { gained, lost, same, problems } = items[0];
        told += ` Of ${problems} problems ${gained} gained, ${lost} lost, ${same} have another answer of the same reward.`;
        cards = items.map(changedCard);
      } else {
        cards = items.map(sampleCard);
      }
      bar.replaceChildren(...switches);
      lead.textContent = told;
      const more = h("button", { type: "button", class: "theme", onclick: () => {
        more.remove();
        list.append(...cards.slice(FIRST));
      } }, `show ${cards.length - FIRST} more`);
      list.className = "samples" + (chosen.kind === "changed" ? "" : " two");
      list.replaceChildren(...(cards.length ? cards.slice(0, FIRST) : [empty("Nothing of this run to show.")]),
        ...(cards.length > FIRST ? [more] : []));
    };
    show();
    return section("samples", "Samples", null, bar, lead, list);
  }

  // Recipe, faults, environment

  function recipePart() {
    const parts = [];
    if (RUNS.length > 1) {
      parts.push(DATA.config.length
        ? h("div", { class: "card scroll" }, h("table", {},
          h("thead", {}, h("tr", {}, h("th", {}, "field"), RUNS.map((run, index) => h("th", {}, chip(index), run.label)))),
          h("tbody", {}, DATA.config.map((row) => h("tr", {}, h("th", { class: "name", scope: "row" }, row.field),
            row.values.map((value) => h("td", { class: "mono" }, value === null ? "–" : value)))))))
        : empty("The recipes of these runs differ in nothing but their names."));
    }
    RUNS.forEach((run, index) => {
      if (!run.config.length) return;
      parts.push(h("details", {}, h("summary", {}, RUNS.length > 1 && chip(index), RUNS.length > 1 ? run.label : "All fields",
        h("span", { class: "soft" }, run.config.length + " fields")),
      h("div", { class: "body scroll" }, h("table", {}, h("tbody", {}, run.config.map(([name, value]) =>
        h("tr", {}, h("th", { class: "name", scope: "row" }, name), h("td", { class: "mono" }, value))))))));
    });
    return section("recipe", RUNS.length > 1 ? "Recipes" : "Recipe",
      RUNS.length > 1 ? "Fields in which the runs differ; – where a recipe has no such field." : null,
      parts.length ? parts : empty("No config.yaml: the recipe is not known."));
  }
  function faultsPart() {
    const body = RUNS.map((run, index) => {
      const starts = run.attempts.length > 0 && h("table", {}, h("thead", {}, h("tr", {},
        ["start", "begun", "from step", "to step", "end", "why"].map((name) => h("th", {}, name)))),
      h("tbody", {}, run.attempts.map((attempt) => {
        const recorded = attempt.state !== undefined;
        const end = recorded ? attempt.state : attempt.is_last ? run.state : attempt.started ? "no end recorded" : "not recorded";
        const why = attempt.cause || (!recorded && attempt.is_last && run.cause) ||
          (attempt.started && !recorded && !attempt.is_last ? "killed, or its machine was lost" : "");
        const files = attempt.stacks.length ? " stacks: " + attempt.stacks.join(", ") : "";
        const changes = attempt.changes.map(([name, before, after]) => `${name}: ${before === null ? "–" : before} → ${after === null ? "–" : after}`);
        return h("tr", {}, h("td", {}, attempt.number), h("td", {}, attempt.started || "–"), h("td", {}, attempt.resumed_step || "0"),
          h("td", {}, attempt.step || (attempt.is_last ? run.step : "–")), h("td", {}, end),
          h("td", {}, why + files, changes.map((change) => h("div", { class: "name" }, change))));
      })));
      const counts = run.faults.length > 0 && h("table", {}, h("thead", {}, h("tr", {}, ["counted", "sum", "steps", "first", "last"].map((name, i) =>
        h("th", { class: i ? "num" : null }, name)))),
      h("tbody", {}, run.faults.map((fault) => h("tr", {}, h("td", { class: "name" }, fault.metric),
        [fault.sum, fault.steps, fault.first, fault.last].map((value) => h("td", { class: "num" }, fmt(value)))))));
      const lines = [
        run.not_finite.length && "Not finite: " + run.not_finite.map((one) => `${one.metric} at ${one.steps} step${one.steps > 1 ? "s" : ""} (${one.first === one.last ? one.first : one.first + " to " + one.last})`).join("; ") + ".",
        run.damaged.length && "Damaged checkpoints, renamed and passed over: " + run.damaged.join(", ") + ".",
        run.checkpoints.length && "Checkpoints: " + run.checkpoints.join(", ") + ".",
        run.earlier.length && "Begun anew; what was there before is in earlier/: " + run.earlier.join(", ") + ".",
        run.cause && "Ended with: " + run.cause + (run.exit_code ? ` (exit code ${run.exit_code})` : "") + (run.rank !== null ? `, rank ${run.rank}` : ""),
      ].filter(Boolean);
      const notices = run.attempts.flatMap((attempt) => attempt.notices.map((notice) => [attempt.number, notice]));
      const warned = notices.length > 0 && h("table", {}, h("thead", {}, h("tr", {},
        ["start", "after step", "warning"].map((name) => h("th", {}, name)))),
      h("tbody", {}, notices.map(([number, notice]) => h("tr", {}, h("td", {}, number),
        h("td", {}, isNumber(notice.step) ? fmt(notice.step) : "–"), h("td", {}, notice.text)))));
      const nothing = !run.faults.length && !run.not_finite.length && !run.cause && !run.damaged.length;
      return h("div", { class: "card scroll" }, RUNS.length > 1 && h("h3", {}, chip(index), run.label),
        nothing && h("p", { class: "soft" }, run.num_logged ? "No fault was counted." : "Nothing to tell yet."),
        counts, lines.map((line) => h("p", {}, line)), starts, warned);
    });
    return section("faults", "Faults and restarts", "What was counted as wrong, and how each start of a run ended.", h("div", { class: "samples" }, body));
  }
  function replaysPart() {
    const having = RUNS.map((run, index) => [run, index]).filter(([run]) => run.replays && run.replays.length);
    if (!having.length) return null;
    const row = (cells) => h("tr", {}, cells.map((cell, i) => h("td", { class: i > 1 ? "num" : null }, cell)));
    const cards = having.flatMap(([run, index]) => run.replays.map((replay) => h("div", { class: "card scroll" },
      h("h3", {}, RUNS.length > 1 && chip(index), replay.title + (replay.changes.length ? ", changed: " + replay.changes.join(", ") : "")),
      h("p", { class: "soft" }, replay.made),
      replay.lines.map((line) => h("p", {}, line)),
      replay.metrics.length > 0 && h("table", {}, h("thead", {}, h("tr", {}, ["metric", "in the run", "with the change"].map((name, i) => h("th", { class: i ? "num" : null }, name)))),
        h("tbody", {}, replay.metrics.map(([name, before, now]) => h("tr", {}, h("td", { class: "name" }, name),
          h("td", { class: "num" }, before), h("td", { class: "num" }, now))))),
      replay.rows.length > 0 && h("table", {}, h("thead", {}, h("tr", {}, replay.columns.map((name, i) => h("th", { class: i > 1 ? "num" : null }, name)))),
        h("tbody", {}, replay.rows.map(row))))));
    return section("replays", "Replays", "Steps that megarl replay executed again, and the effect of changes on each sample.", h("div", { class: "samples" }, cards));
  }
  function environmentPart() {
    const newest = RUNS.map((run) => {
      const known = run.attempts.filter((attempt) => Object.keys(attempt.environment).length);
      return known.length ? known[known.length - 1].environment : {};
    });
    const names = [...new Set(newest.flatMap((one) => Object.keys(one)))];
    const table = names.length
      ? h("div", { class: "card scroll" }, h("table", {},
        RUNS.length > 1 && h("thead", {}, h("tr", {}, h("th"), RUNS.map((run, index) => h("th", {}, chip(index), run.label)))),
        h("tbody", {}, names.map((name) => h("tr", {}, h("th", { scope: "row" }, name),
          newest.map((one) => h("td", {}, one[name] === undefined ? "–" : one[name])))))))
      : empty("Not recorded: the run was begun by a megarl that did not write logs/attempt_N/attempt.json.");
    return section("environment", "Environment", names.length ? "Versions and machine of the driver at the newest start." : null, table);
  }

  // Evaluations

  const percent = (value) => (100 * value).toFixed(1);
  const signed = (value) => (value >= 0 ? "+" : "−") + fmt(Math.abs(value));
  const isScore = (measure) => measure.startsWith("reward/");
  const points = (value) => (value >= 0 ? "+" : "−") + Math.abs(100 * value).toFixed(1);
  const interval = (measure, text) => h("span", {}, h("b", {}, text(measure.value)),
    h("span", { class: "soft" }, ` ${text(measure.low)} to ${text(measure.high)}`));
  function accuraciesPart() {
    const all = DATA.evaluations;
    const sets = [...new Set(all.flatMap((one) => one.sets.map((of) => of.set)))];
    const find = (one, name) => one.sets.find((of) => of.set === name);
    const rows = sets.flatMap((name) => {
      const measures = [...new Set(all.flatMap((one) => Object.keys((find(one, name) || { measures: {} }).measures)))];
      return measures.map((measure, place) => h("tr", {}, h("th", { scope: "row" }, place === 0 ? name : ""), h("td", { class: "name" }, measure),
        all.map((one) => {
          const of = find(one, name);
          return h("td", {}, of && of.measures[measure] ? interval(of.measures[measure], isScore(measure) ? fmt : percent) : "–",
            of && place === 0 && h("span", { class: "soft" }, `, ${fmt(of.problems)} problems`));
        })));
    });
    const table = h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "set"), h("th", {}, "measure"),
      all.map((one, index) => h("th", {}, chip(index), one.label)))),
    h("tbody", {}, h("tr", {}, h("th", { scope: "row" }, "model"), h("td"), all.map((one) => h("td", { class: "mono" }, one.model || "–"))), rows));
    return section("accuracies", "Accuracies", "Per cent, rewards as they are, with the 95 % interval: about other problems of the same kind.",
      h("div", { class: "card scroll" }, table), all.flatMap((one) => one.notes).map((note) => h("p", { class: "note" }, note)));
  }
  function differencePart() {
    if (!DATA.comparisons.length) return null;
    const cards = DATA.comparisons.map(({ other, sets }) => {
      const head = h("h3", {}, chip(other), DATA.evaluations[other].label, h("span", { class: "soft" }, " minus "), chip(0), DATA.evaluations[0].label);
      if (!sets.length) return h("div", { class: "card" }, head, empty("They have no validation set of the same name."));
      const rows = sets.map((of) => h("tr", {}, h("th", { scope: "row" }, of.set), h("td", { class: "num" }, fmt(of.problems)),
        h("td", { class: "name" }, of.measure),
        h("td", {}, of.difference ? interval(of.difference, isScore(of.measure) ? signed : points) : "–"), h("td", { class: "num" }, fmt(of.gained)), h("td", { class: "num" }, fmt(of.lost)),
        h("td", {}, !of.difference ? "" : of.difference.low > 0 ? h("span", { class: "good" }, "better") : of.difference.high < 0 ? h("span", { class: "bad" }, "worse") : "not told apart"),
        h("td", { class: "num" }, of.left_out ? fmt(of.left_out) : "–")));
      return h("div", { class: "card scroll" }, head, h("table", {}, h("thead", {}, h("tr", {},
        [["set"], ["problems of both", 1], ["measure"], ["difference"], ["gained", 1], ["lost", 1], ["at 95 %"], ["not in both", 1]].map(([name, isNum]) => h("th", { class: isNum ? "num" : null }, name)))),
      h("tbody", {}, rows)));
    });
    return section("difference", "Difference", "Problem by problem: the mean of the later accuracy minus the earlier one in points, with its 95 % interval. " +
      "Where answers have no verdict, the reward is compared. " +
      "Problems of one evaluation alone, or with another prompt or gold answer, are left out.", cards);
  }
  function changedPart() {
    const having = DATA.comparisons.filter(({ changed }) => changed.length);
    if (!DATA.comparisons.length) return null;
    if (!having.length) return section("changed", "Answers that changed", null, empty("No answer changed."));
    const list = h("div", { class: "samples" });
    const lead = h("p", { class: "lead" });
    const show = (comparison) => {
      const { gained, lost, same, problems } = comparison.changed[0];
      lead.textContent = `Of ${problems} problems ${gained} gained, ${lost} lost, ${same} have another answer that is as right. ` +
        `Left: ${DATA.evaluations[0].label}; right: ${DATA.evaluations[comparison.other].label}.`;
      const cards = comparison.changed.map(changedCard);
      const more = h("button", { type: "button", class: "theme", onclick: () => { more.remove(); list.append(...cards.slice(FIRST)); } }, `show ${cards.length - FIRST} more`);
      list.replaceChildren(...cards.slice(0, FIRST), ...(cards.length > FIRST ? [more] : []));
    };
    show(having[0]);
    const bar = having.length > 1 && h("div", { class: "bar" },
      segment("against the first", having.map((one) => [[chip(one.other), DATA.evaluations[one.other].label], one]), having[0], show));
    return section("changed", "Answers that changed", null, bar, lead, list);
  }
  function answersPart() {
    if (!DATA.answers) return null;
    const list = h("div", { class: "samples two" });
    const kinds = ["wrong", "right"].filter((kind) => DATA.answers[kind].length);
    const show = (kind) => list.replaceChildren(...DATA.answers[kind].map(sampleCard));
    show(kinds[0]);
    return section("answers", "Answers", "The first of each kind; megarl samples shows all.",
      h("div", { class: "bar" }, segment("show", kinds.map((kind) => [kind, kind]), kinds[0], show)), list);
  }

  // The page

  function theme() {
    const names = ["auto", "light", "dark"];
    let at = 0;
    try { at = Math.max(0, names.indexOf(localStorage.getItem("megarl-theme"))); } catch (error) { /* no storage for files */ }
    const button = h("button", { type: "button", class: "theme", title: "colours of the page" });
    const apply = () => {
      if (names[at] === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = names[at];
      button.textContent = "colours: " + names[at];
    };
    button.addEventListener("click", () => {
      at = (at + 1) % names.length;
      try { localStorage.setItem("megarl-theme", names[at]); } catch (error) { /* as above */ }
      apply();
    });
    const asked = names.indexOf(location.hash.replace("#theme=", ""));
    if (asked > 0) at = asked;
    apply();
    return button;
  }
  const isOfEvaluations = Boolean(DATA.evaluations);
  const loops = new Set(RUNS.map((run) => run.loop).filter(Boolean));
  const under = [
    isOfEvaluations ? (RUNS.length === 1 ? DATA.evaluations[0].path : `${RUNS.length} evaluations`)
      : RUNS.length === 1 ? RUNS[0].path : `${RUNS.length} runs`,
    loops.size > 1 ? "different loops (" + [...loops].join(", ") + "): a curve shows those that have its metric" : null,
    "made " + DATA.made,
  ].filter(Boolean).join(" · ");
  const parts = isOfEvaluations ? [accuraciesPart(), differencePart(), changedPart(), answersPart(), recipePart()]
    : [overview(), curvesPart(), timePart(), spreadPart(), samplesPart(), recipePart(), faultsPart(), replaysPart(), environmentPart(), allMetrics()];
  document.getElementById("page").append(
    h("header", {}, h("div", {}, h("h1", {}, RUNS.map((run, index) =>
      [index > 0 && h("span", { class: "soft" }, " vs "), RUNS.length > 1 && chip(index), run.label])),
    h("div", { class: "under" }, under)), theme()),
    h("nav", { "aria-label": "sections" }, sections.map(([id, title]) => h("a", { href: "#" + id }, title))),
    ...parts.filter(Boolean),
    h("footer", {}, "megarl report. Everything is in this file; it loads nothing."));
  redraw();
  let wait = 0;
  addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(() => redraw(), 120); });
  document.documentElement.dataset.ready = String(document.querySelectorAll("path.curve").length);
})();
