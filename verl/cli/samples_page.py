"""Samples as one HTML page that needs nothing else: a table to sort, to filter, and to follow one prompt through.

What is chosen stands in the address after `#`, so that a view can be sent to somebody: `samples.html#sort=-score`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from verl.cli.output import plain
from verl.cli.samples_read import Sample

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 1rem; color: #222; background: #fff }
form { display: flex; flex-wrap: wrap; gap: .6rem; margin: .6rem 0; align-items: end }
label { display: flex; flex-direction: column; font-size: 12px; color: #555 }
input, select { font: inherit; padding: .2rem .4rem }
input[type=number] { width: 6rem }
table { border-collapse: collapse; width: 100% }
th { position: sticky; top: 0; background: #f2f2f2; cursor: pointer; text-align: left; white-space: nowrap }
th, td { padding: .3rem .5rem; border-bottom: 1px solid #ddd; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace; max-width: 40rem }
td.prompt { cursor: pointer }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818 } th { background: #2a2a2a } th, td { border-color: #444 }
}
"""

_SCRIPT = """
const rows = JSON.parse(document.getElementById("rows").textContent);
const columns = [
  ["step", "step"], ["source", "source"], ["prompt_id", "prompt id"], ["score", "reward"], ["length", "tokens"],
  ["prompt", "prompt"], ["response", "response"],
];
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
  const rank = (value) => value === null ? 2 : typeof value === "number" ? 0 : 1;  // what is no number comes after them
  if (left === right || rank(left) !== rank(right)) return rank(left) - rank(right);
  return (left < right ? -1 : 1) * (falls ? -1 : 1);
}

function cell(row, name) {
  const td = document.createElement("td"), value = row[name];
  td.textContent = value === null ? "" : typeof value === "number" ? +value.toPrecision(6) : value;
  td.className = typeof value === "number" ? "number" : "text";
  if (name === "prompt") {
    td.classList.add("prompt");
    td.title = "this prompt through all steps";
    td.onclick = () => change({exact: row.prompt, sort: "step"});
  }
  if (name === "response") td.title = JSON.stringify(row.others, null, 1);
  return td;
}

function show() {
  const asked = state(), sort = asked.get("sort") || "step", falls = sort.startsWith("-");
  const name = sort.replace("-", "");
  const chosen = rows.filter((row) => passes(row, asked));
  chosen.sort((left, right) => compare(left[name], right[name], falls));
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
"""


def page(samples: Sequence[Sample], title: str) -> str:
    """The page. What was drawn never becomes a part of its markup: it is data, and shown as text."""
    data = json.dumps(plain([sample.as_json() for sample in samples]), allow_nan=False)
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    told = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{told}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f'<body><h1>{told}</h1><form></form><p id="count"></p>\n'
        "<table><thead><tr></tr></thead><tbody></tbody></table>\n"
        f'<script id="rows" type="application/json">{data}</script>\n<script>{_SCRIPT}</script></body></html>\n'
    )
