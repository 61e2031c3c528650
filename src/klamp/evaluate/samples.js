"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const [QUESTION, SAMPLE, STATE, TRUNCATED, REWARD, TOKENS, ANSWER, COMPLETION] = [0, 1, 2, 3, 4, 5, 6, 7];
const at = id => document.getElementById(id);
const list = at("list"), search = at("search"), filters = [...document.querySelectorAll("[data-filter]")];
const PAGE = 200; // entries of the list that exist at a time
let filter = "all", shown = [], place = -1, first = 0;

// Control characters as their pictures, so that none acts and each is seen.
const visible = text => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g,
  c => String.fromCharCode(c === "\u007f" ? 0x2421 : 0x2400 + c.charCodeAt(0)));
const passes = (row, name) => name === "all" || (name === "truncated" ? row[TRUNCATED] : row[STATE] === name);
const haystack = data.samples.map(row =>
  (data.questions[row[QUESTION]].prompt + "\n" + row[COMPLETION] + "\n" + data.questions[row[QUESTION]].gold).toLowerCase());

function narrow() {
  const before = shown[place], wanted = search.value.toLowerCase();
  const found = data.samples.map((_, i) => i).filter(i => haystack[i].includes(wanted));
  for (const button of filters) {
    button.querySelector("b").textContent = found.filter(i => passes(data.samples[i], button.dataset.filter)).length;
    button.setAttribute("aria-pressed", String(button.dataset.filter === filter));
  }
  shown = found.filter(i => passes(data.samples[i], filter));
  at("count").textContent = shown.length === 1 ? "1 sample" : shown.length + " samples";
  const again = shown.indexOf(before);
  place = -1;
  draw(Math.max(0, again));
  show(Math.max(0, again));
}

function draw(from) {
  first = Math.max(0, Math.min(from - PAGE / 2, shown.length - PAGE));
  list.replaceChildren(...shown.slice(first, first + PAGE).map((index, k) => {
    const row = data.samples[index], entry = document.createElement("div");
    const mark = document.createElement("span"), name = document.createElement("span"), text = document.createElement("i");
    mark.className = row[STATE];
    mark.textContent = { correct: "\u2713", wrong: "\u2717", unscored: "?" }[row[STATE]];
    mark.setAttribute("aria-label", row[STATE]);
    name.textContent = (row[QUESTION] + 1) + "." + (row[SAMPLE] + 1);
    text.textContent = visible(row[COMPLETION].slice(0, 80).replace(/\s+/g, " "));
    entry.append(mark, name, text);
    entry.setAttribute("role", "option");
    entry.id = "entry-" + (first + k);
    entry.addEventListener("click", () => show(first + k));
    return entry;
  }));
}

function show(k) {
  at("sample").hidden = shown.length === 0;
  if (shown.length === 0) { list.removeAttribute("aria-activedescendant"); return; }
  place = Math.max(0, Math.min(shown.length - 1, k));
  if (place < first || place >= first + list.children.length) draw(place);
  for (const entry of list.children) entry.setAttribute("aria-selected", String(entry.id === "entry-" + place));
  const entry = at("entry-" + place), row = data.samples[shown[place]], question = data.questions[row[QUESTION]];
  list.setAttribute("aria-activedescendant", entry.id);
  if (entry.offsetTop < list.scrollTop || entry.offsetTop + entry.offsetHeight > list.scrollTop + list.clientHeight)
    list.scrollTop = entry.offsetTop - list.clientHeight / 2;
  const right = question.right === null ? "" : ", " + question.right[0] + " of " + question.right[1] + " samples correct";
  at("where").textContent = "Question " + (row[QUESTION] + 1) + ", sample " + (row[SAMPLE] + 1) + right;
  at("state").textContent = row[STATE] + (row[TRUNCATED] ? ", truncated" : "");
  at("state").className = row[STATE];
  at("prompt").textContent = visible(question.prompt);
  at("completion").textContent = visible(row[COMPLETION]);
  at("answer").textContent = row[ANSWER] === null ? "none" : visible(row[ANSWER]);
  at("gold").textContent = visible(question.gold);
  at("reward").textContent = row[REWARD] === null ? "none" : String(row[REWARD]);
  at("tokens").textContent = row[TOKENS] + (row[TRUNCATED] ? " (the limit)" : "");
  at("previous").disabled = place === 0;
  at("next").disabled = place === shown.length - 1;
}

// The first sample of the next or previous question among those shown.
function turn(by) {
  const of = k => data.samples[shown[k]][QUESTION];
  let k = place;
  while (k >= 0 && k < shown.length && of(k) === of(place)) k += by;
  if (k < 0 || k >= shown.length) return;
  while (by < 0 && k > 0 && of(k - 1) === of(k)) k -= 1;
  show(k);
}

for (const button of filters) button.addEventListener("click", () => { filter = button.dataset.filter; narrow(); });
search.addEventListener("input", narrow);
at("previous").addEventListener("click", () => show(place - 1));
at("next").addEventListener("click", () => show(place + 1));
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === search) {
    if (event.key === "Escape" || event.key === "Enter") { event.preventDefault(); list.focus({ preventScroll: true }); }
    return;
  }
  const inList = event.target === list;
  const act = { j: () => show(place + 1), k: () => show(place - 1), n: () => turn(1), p: () => turn(-1),
    "/": () => search.focus(), ...(inList ? { ArrowDown: () => show(place + 1), ArrowUp: () => show(place - 1),
      Home: () => show(0), End: () => show(shown.length - 1) } : {}) }[event.key];
  const chosen = filters["12345".indexOf(event.key)];
  if (act) { event.preventDefault(); act(); } else if (chosen) chosen.click();
});
narrow();
