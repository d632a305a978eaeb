"use strict";
const get = id => document.getElementById(id), sections = [...document.querySelectorAll(".rollout")];
function filter() {
  const text = get("find").value.toLowerCase(), low = parseFloat(get("low").value), high = parseFloat(get("high").value);
  for (const one of sections) {
    const reward = Number(one.dataset.reward);
    one.hidden = !one.textContent.toLowerCase().includes(text) || reward < low || reward > high
      || (get("called").checked && one.dataset.calls === "0");
  }
  get("count").textContent = sections.filter(one => !one.hidden).length;
}
for (const id of ["find", "low", "high", "called"]) get(id).addEventListener("input", filter);
