const rows = JSON.parse(document.getElementById("rows").textContent);
const OF_BUFFER = new Set(["sample", "policy_version", "advantage", "episode"]);
const ofData = [...new Set(rows.flatMap((row) => Object.keys(row.others)))].filter((name) => !OF_BUFFER.has(name));
const columns = [
  ["step", "step"], ["source", "source"], ["prompt_id", "prompt id"], ["score", "reward"], ["length", "tokens"],
  ["prompt", "prompt"], ["response", "response"], ...ofData.map((name) => ["others." + name, name]),
];
const valueOf = (row, key) => {
  const value = key.startsWith("others.") ? row.others[key.slice(7)] : row[key];
  return value === undefined ? null : value !== null && typeof value === "object" ? JSON.stringify(value) : value;
};
const ranges = ["step", "score", "length"];
const MOST = 1000;  // rows drawn at a time
const state = () => new URLSearchParams(location.hash.slice(1));

function change(values) {
  const next = state();
  for (const [name, value] of Object.entries(values)) value === "" ? next.delete(name) : next.set(name, value);
  location.hash = next.toString();
  show();
}

function passes(row, asked) {
  for (const name of ranges) {
    const low = asked.get(name + "_min"), high = asked.get(name + "_max");
    if (low === null && high === null) continue;
    const value = row[name];
    if (value === null || (low !== null && value < +low) || (high !== null && value > +high)) return false;
  }
  for (const name of ["prompt", "response"])
    if (asked.get(name) !== null && !row[name].includes(asked.get(name))) return false;
  if (asked.get("exact") !== null && row.prompt !== asked.get("exact")) return false;
  return asked.get("source") === null || row.source === asked.get("source");
}

function compare(left, right, falls) {
  const rank = (value) => value === null ? 2 : typeof value === "number" ? 0 : 1;  // others come after numbers
  if (left === right || rank(left) !== rank(right)) return rank(left) - rank(right);
  return (left < right ? -1 : 1) * (falls ? -1 : 1);
}

// Who wrote what: the model's tokens, which are trained on, and the environment's, which are masked.
function turnsOf(episode) {
  const parts = [];
  const add = (kind, text, title) => {
    const span = document.createElement("span");
    Object.assign(span, {className: kind, textContent: text, title});
    parts.push(span);
  };
  episode.turns.forEach((turn, number) => {
    const said = turn.text + (turn.is_complete ? "" : " ... cut");
    add("model", said, `turn ${number}, ${turn.tokens} tokens of the model`);
    if (turn.reward) add("reward", ` [${+turn.reward.toPrecision(6)}]`, "reward of the turn");
    parts.push(document.createTextNode("\n"));
    if (turn.observation === null) return;
    const text = typeof turn.observation === "string" ? turn.observation
      : turn.observation.map((message) => message.content).join("\n");
    const describe = (call) => `${call.name} ${call.outcome} ${call.seconds.toPrecision(3)} s ${call.error}`;
    const calls = turn.calls.map(describe);
    add("environment", text, ["of the environment, masked", ...calls].join("\n"));
    parts.push(document.createTextNode("\n"));
  });
  add("reward", `ended by ${episode.end}`, `${episode.seconds.toPrecision(3)} s`);
  return parts;
}

function cell(row, name) {
  const td = document.createElement("td"), value = valueOf(row, name);
  td.textContent = value === null ? "" : typeof value === "number" ? +value.toPrecision(6) : value;
  td.className = typeof value === "number" ? "number" : "text";
  if (name === "prompt") {
    td.classList.add("prompt");
    td.title = "this prompt through all steps";
    td.onclick = () => change({exact: row.prompt, sort: "step"});
  }
  if (name === "response" && row.others.episode) {
    td.replaceChildren(...turnsOf(row.others.episode));
  } else if (name === "response") td.title = JSON.stringify(row.others, null, 1);
  return td;
}

function show() {
  const asked = state(), sort = asked.get("sort") || "step", falls = sort.startsWith("-");
  const name = sort.replace(/^-/, "");
  const chosen = rows.filter((row) => passes(row, asked));
  chosen.sort((left, right) => compare(valueOf(left, name), valueOf(right, name), falls));
  const body = document.querySelector("tbody");
  body.replaceChildren(...chosen.slice(0, MOST).map((row) => {
    const tr = document.createElement("tr");
    tr.append(...columns.map(([key]) => cell(row, key)));
    return tr;
  }));
  const cut = chosen.length > MOST ? `, the first ${MOST} shown` : "";
  const scores = chosen.map((row) => row.score).filter((score) => typeof score === "number");
  const mean = scores.length ? `, mean reward ${(scores.reduce((a, b) => a + b, 0) / scores.length).toFixed(4)}` : "";
  document.getElementById("count").textContent = `${chosen.length} of ${rows.length} rows${cut}${mean}`;
  for (const input of document.querySelectorAll("form [name]")) input.value = asked.get(input.name) || "";
  for (const th of document.querySelectorAll("th"))
    th.setAttribute("aria-sort", th.dataset.key !== name ? "none" : falls ? "descending" : "ascending");
}

function build() {
  const form = document.querySelector("form");
  const field = (name, text, type) => {
    const label = document.createElement("label"), input = document.createElement("input");
    Object.assign(input, {name, type, step: "any"});
    input.onchange = () => change({[name]: input.value});
    label.append(text, input);
    form.append(label);
  };
  for (const [name, text] of columns.filter(([key]) => ranges.includes(key)))
    for (const end of ["min", "max"]) field(`${name}_${end}`, `${text} ${end}`, "number");
  for (const name of ["prompt", "response"]) field(name, `${name} contains`, "text");
  const label = document.createElement("label"), select = document.createElement("select");
  select.name = "source";
  for (const source of ["", ...new Set(rows.map((row) => row.source))]) select.add(new Option(source || "all", source));
  select.onchange = () => change({source: select.value});
  label.append("source", select);
  const all = Object.assign(document.createElement("button"), {type: "button", textContent: "show all"});
  all.onclick = () => { location.hash = ""; show(); };
  form.append(label, all);
  document.querySelector("thead tr").append(...columns.map(([key, text]) => {
    const th = document.createElement("th");
    th.textContent = text;
    th.dataset.key = key;
    th.onclick = () => change({sort: state().get("sort") === key ? "-" + key : key});
    return th;
  }));
}

build();
show();
window.addEventListener("hashchange", show);
