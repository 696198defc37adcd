"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const [WORD, JOINED, STATE] = [0, 1, 2]; // how a token is shown
  const MILLISECONDS = 800; // of one pass at speed 1
  let text = data.texts[0], chips = [], pass = 0, shown = 0, timer = null;

  const make = (tag, className, content) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (content !== undefined) node.textContent = content;
    return node;
  };
  const percent = (p) => (p >= 0.9995 ? "100 %" : p < 0.0005 ? "< 0.1 %" : `${(100 * p).toFixed(p < 0.1 ? 1 : 0)} %`);
  const word = (token) => data.tokens[token][0];
  const kind = (token) => data.tokens[token][1];
  const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

  // What every position holds after a number of passes: null, or {token, probability, candidates, pass, before}.
  function stateAfter(passes) {
    const state = new Array(text.length).fill(null);
    text.passes.slice(0, passes).forEach((writes, index) => {
      for (const [position, token, probability, candidates] of writes) {
        const before = state[position];
        state[position] = token === null ? null : { token, probability, candidates, pass: index + 1, before };
      }
    });
    return state;
  }

  const isWord = (entry) => entry !== null && entry !== undefined && kind(entry.token) !== STATE;
  const joins = (entry, left) => isWord(entry) && isWord(left) && kind(entry.token) === JOINED;

  // Whether a pass wrote over a word somewhere.
  function hasChanges({ passes }) {
    const written = new Set();
    return passes.some((writes) => writes.some(([position, token]) => {
      if (token === null) {
        written.delete(position); // masked again
        return false;
      }
      const changes = written.has(position);
      if (kind(token) !== STATE) written.add(position);
      return changes;
    }));
  }

  function words(state) {
    let line = "";
    state.forEach((entry, position) => {
      const part = isWord(entry) ? word(entry.token) : data.masked ? "…" : "";
      if (part === "" || (part === "…" && line.endsWith("…"))) return;
      line += (line === "" || joins(entry, state[position - 1]) ? "" : " ") + part;
    });
    return line;
  }

  function showChip(chip, entry, left, position) {
    const fresh = entry !== null && entry.pass === pass;
    const names = ["token"];
    if (entry === null) names.push("mask");
    if (entry !== null && !isWord(entry)) names.push("state");
    if (joins(entry, left)) names.push("joined");
    if (fresh) names.push("fresh");
    if (fresh && isWord(entry.before)) names.push("changed");
    chip.className = names.join(" ");
    chip.hidden = entry === null && !data.masked;
    chip.textContent = entry === null ? "" : word(entry.token);
    const sure = entry !== null && entry.probability !== null;
    chip.style.setProperty("--p", sure ? entry.probability : 0.5);
    const name = entry === null ? "[MASK]" : `${word(entry.token)}${sure ? `, ${percent(entry.probability)}` : ""}`;
    chip.setAttribute("aria-label", `${position + 1}: ${name}`);
    chip.setAttribute("aria-pressed", String(position === shown));
  }

  function showDetails(state) {
    const box = element("details"), entry = state[shown] ?? null;
    box.replaceChildren();
    if (text.length === 0) return void box.append(make("p", "faint", "This text has no words."));
    box.append(make("h2", "", entry === null ? "[MASK]" : word(entry.token)));
    const place = `Position ${shown + 1} of ${text.length}`;
    if (entry === null) {
      const next = text.passes.findIndex((writes, i) => i >= pass && writes.some((w) => w[0] === shown && w[1] !== null));
      return void box.append(make("p", "faint", `${place}. Not written yet${next >= 0 ? `: pass ${next + 1} will` : ""}.`));
    }
    const how = entry.probability === null ? "" : ` with probability ${percent(entry.probability)}`;
    box.append(make("p", "faint", `${place}. Written in pass ${entry.pass}${how}.`));
    if (entry.before) box.append(make("p", "faint", `Before: ${word(entry.before.token)} (pass ${entry.before.pass}).`));
    const rows = [...entry.candidates];
    const listed = rows.some(([token]) => token === entry.token);
    if (!listed && entry.probability !== null) rows.push([entry.token, entry.probability]);
    const list = make("ol", "candidates");
    for (const [token, probability] of rows) {
      const item = make("li", token === entry.token ? "chosen" : "");
      const bar = make("span", "measure");
      bar.style.setProperty("--p", probability);
      item.append(make("span", "word", word(token)), bar, make("span", "number", percent(probability)));
      list.append(item);
    }
    box.append(make("h3", "", "Candidates"), list);
  }

  function show() {
    const state = stateAfter(pass), last = text.passes.length;
    chips.forEach((chip, i) => {
      showChip(chip, state[i], i > 0 ? state[i - 1] : null, i);
      chip.tabIndex = i === shown ? 0 : -1;
    });
    const atEnd = pass === last;
    element("text-label").textContent = atEnd ? "Final text" : "So far";
    element("text").textContent = atEnd ? text.text : words(state);
    element("slider").value = pass;
    const written = pass === 0 ? 0 : text.passes[pass - 1].length;
    const filled = state.filter(isWord).length;
    const changes = `${written} new, ${filled} of ${count(text.length, "token")} written`;
    element("counter").textContent = `Pass ${pass} of ${last}: ${changes}`;
    element("slider").setAttribute("aria-valuetext", element("counter").textContent);
    for (const id of ["first", "back"]) element(id).disabled = pass === 0;
    for (const id of ["step", "last"]) element(id).disabled = atEnd;
    showDetails(state);
  }

  function go(target) {
    pass = Math.max(0, Math.min(target, text.passes.length));
    if (pass === text.passes.length) stop();
    show();
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    element("play").textContent = "Play";
  }

  function start() {
    clearInterval(timer);
    if (pass === text.passes.length) go(0);
    element("play").textContent = "Pause";
    timer = setInterval(() => go(pass + 1), MILLISECONDS / Number(element("speed").value));
  }

  const toggle = () => (timer === null ? start() : stop());

  function select(position) {
    shown = position;
    show();
  }

  function choose(index) {
    stop();
    const bounded = Math.max(0, Math.min(index, data.texts.length - 1));
    text = data.texts[bounded];
    element("choice").value = bounded;
    element("previous-text").disabled = bounded === 0;
    element("next-text").disabled = bounded === data.texts.length - 1;
    element("reference-row").hidden = text.reference === null;
    element("reference").textContent = text.reference ?? "";
    element("slider").max = text.passes.length;
    chips = Array.from({ length: text.length }, (_, position) => {
      const chip = make("button");
      chip.type = "button";
      for (const event of ["pointerenter", "focus", "click"]) chip.addEventListener(event, () => select(position));
      return chip;
    });
    element("tokens").replaceChildren(...chips);
    shown = 0;
    // The finished text first: nothing but masks would say little, and Play starts from them.
    go(text.passes.length);
  }

  function moveFocus(step) {
    let target = shown + step;
    while (chips[target]?.hidden) target += step;
    chips[target]?.focus();
  }

  function onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const at = event.target, inside = at.closest("#tokens") !== null;
    const typing = at.tagName === "SELECT" || at.id === "slider";
    const actions = {
      ArrowLeft: () => (inside ? moveFocus(-1) : go(pass - 1)),
      ArrowRight: () => (inside ? moveFocus(1) : go(pass + 1)),
      Home: () => go(0),
      End: () => go(text.passes.length),
      p: () => choose(Number(element("choice").value) - 1),
      n: () => choose(Number(element("choice").value) + 1),
    };
    // A button keeps its own meaning of the space key, a list and the slider that of all keys.
    if (at.tagName !== "BUTTON" || inside) actions[" "] = toggle;
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (action === undefined || typing) return;
    event.preventDefault();
    action();
  }

  element("title").textContent = data.title;
  element("settings").textContent = data.settings.join(" · ");
  element("note").textContent = data.note;
  element("mask-legend").hidden = !data.masked;
  element("changed-legend").hidden = !data.texts.some(hasChanges);
  element("state-legend").hidden = !data.tokens.some((token) => token[1] === STATE);
  data.texts.forEach((entry, index) => {
    const label = `${entry.index}: ${entry.reference ?? entry.text}`;
    const option = make("option", "", label.length > 90 ? `${label.slice(0, 90)}…` : label);
    option.value = index;
    element("choice").append(option);
  });
  const onClick = { first: () => go(0), back: () => go(pass - 1), play: toggle, step: () => go(pass + 1) };
  onClick.last = () => go(text.passes.length);
  onClick["previous-text"] = () => choose(Number(element("choice").value) - 1);
  onClick["next-text"] = () => choose(Number(element("choice").value) + 1);
  for (const [id, action] of Object.entries(onClick)) element(id).addEventListener("click", action);
  element("choice").addEventListener("change", () => choose(Number(element("choice").value)));
  element("slider").addEventListener("input", () => go(Number(element("slider").value)));
  element("speed").addEventListener("change", () => timer !== null && start());
  document.addEventListener("keydown", onKey);
  choose(0);
})();
