// The computing half of page.js: node --test tests/cli/report/page.test.js
"use strict";
const test = require("node:test");
const assert = require("node:assert");
const page = require("../../../verl/cli/report/page.js");

const base64 = (values) => Buffer.from(Float32Array.from(values).buffer).toString("base64");

test("numbers travel as base64 of Float32", () => {
  assert.deepStrictEqual([...page.decode(base64([1, -2.5, NaN]))], [1, -2.5, NaN]);
});

test("100,000 values become at most four points in a pixel, and the one spike stays", () => {
  const xs = Float32Array.from({length: 100000}, (_, i) => i), ys = xs.map((x) => Math.sin(x / 1000));
  ys[54321] = 99;
  const began = performance.now(), points = page.pixelColumns(xs, ys, 0, 99999, 400);
  assert.ok(performance.now() - began < 500);
  assert.ok(points.length <= 1604);
  assert.strictEqual(Math.max(...points.map(([, y]) => y)), 99);
  assert.ok(points.every(([x], i) => i === 0 || x >= points[i - 1][0]));
});

test("a gap interrupts a line, and other values are where they are", () => {
  assert.deepStrictEqual(page.pixelColumns([0, 1, 2, 3], [5, NaN, 7, 8], 0, 3, 300), [[0, 5], [100, NaN], [200, 7], [300, 8]]);
});

test("smoothing is centred: a straight line stays one, gaps stay gaps", () => {
  assert.deepStrictEqual([...page.smooth([1, 2, 3, 4, 5, 6], 5)], [1, 2, 3, 4, 5, 6]);
  assert.deepStrictEqual([...page.smooth([0, 3, NaN, 3], 3)], [0, 1.5, NaN, 3]);
});

test("a position is found, and a value between two is interpolated", () => {
  assert.strictEqual(page.lowerBound([1, 3, 5], 3), 1);
  assert.strictEqual(page.nearest([1, 3, 5], 4.5), 2);
  assert.strictEqual(page.interpolate([10, 20], [100, 200], 15), 150);
  assert.strictEqual(page.interpolate([10, 20], [100, 200], 0), 0);
  assert.deepStrictEqual(page.extent([0, 1, 2], [NaN, 4, -1], 0, 2), [-1, 4]);
});

test("marks of an axis are round and inside", () => {
  assert.deepStrictEqual(page.ticks(0, 1, 5), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepStrictEqual(page.ticks(7, 7.0001, 2).length > 0, true);
});

test("a band over three seeds is the mean and Student's interval, at the steps that all have", () => {
  const curves = [[1, 2], [2, 4], [3, 6]].map((ys) => ({xs: [1, 2], ys}));
  curves[2].xs = [1, 3];
  const {xs, mean, high} = page.band(curves, 4.303);
  assert.deepStrictEqual([xs, mean], [[1], [2]]);
  assert.ok(Math.abs(high[0] - 2 - 4.303 / Math.sqrt(3)) < 1e-9);
});

test("the difference of two texts is by words, and gives both back", () => {
  const parts = page.wordDiff("the answer is 4", "an answer is 5");
  assert.deepStrictEqual(parts.filter(([kind]) => kind !== "same"), [["del", "the"], ["ins", "an"], ["del", "4"], ["ins", "5"]]);
  const text = (skip) => parts.filter(([kind]) => kind !== skip).map(([, part]) => part).join("");
  assert.deepStrictEqual([text("ins"), text("del")], ["the answer is 4", "an answer is 5"]);
  assert.strictEqual(page.wordDiff("a ".repeat(3000), "b ".repeat(3000)), null);
});

test("control characters and marks of direction become visible", () => {
  assert.strictEqual(page.visible("a\u202eb\u001b[31m\n\t\u200b"), "a\\u202eb\\u001b[31m\n\t\\u200b");
});

test("tokens are coloured by what is recorded", () => {
  const columns = {rollout_log_probs: [-1, -2], old_log_probs: [-1.5, null], advantages: [1, -1], mask: [1, 0]};
  assert.deepStrictEqual(page.TOKEN_VIEWS["gap of log-probs"](columns), [-0.5, null]);
  assert.ok(!page.TOKEN_VIEWS.entropy(columns));
  assert.match(page.tokenColor(1, "advantage", [1, -1]), /^rgba\(214/);
  assert.match(page.tokenColor(-1, "advantage", [1, -1]), /^rgba\(36/);
  assert.deepStrictEqual([page.tokenColor(1, "mask", [1, 0]), page.tokenColor(null, "entropy", [1])], ["", ""]);
});

test("prompts are counted by pass rate first and last", () => {
  const cells = page.rateTable([[1, 0, 1, 1], [2, 0, 0.25, 1], [3, 1, 0, 1]]);
  assert.deepStrictEqual([cells[0][3].length, cells[0][1].length, cells[3][0].length, cells[1][1].length], [1, 1, 1, 0]);
});

test("directories are shown below the one that all have in common", () => {
  assert.deepStrictEqual([["/a/b0", "/a/b1"], ["/a/b", "/a/b/c"], ["/a/b"], ["x", "y"]].map(page.commonDirectory), ["/a/", "/a/", "/a/", ""]);
});

test("samples are filtered and sorted, with what is missing last", () => {
  const row = {step: 3, score: 0.5, length: null, prompt: "p", response: "r", source: "eval"};
  assert.ok(page.passes(row, new URLSearchParams("score_min=0.5&prompt=p")));
  assert.ok(!page.passes(row, new URLSearchParams("length_min=1")));
  assert.deepStrictEqual([3, null, 1, "a"].sort((a, b) => page.compare(a, b, true)), [3, 1, "a", null]);
});

test("numbers are short", () => {
  assert.deepStrictEqual([1234567, 0.123456, 1e-7, 3, NaN, 12345.6].map((x) => page.format(x)),
    ["1.23e+6", "0.1235", "1.00e-7", "3", "none", "12345.6"]);
});
