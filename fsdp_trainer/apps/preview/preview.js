"use strict";
// A token's document has the ids of all its tokens; its place among its neighbours tells the rest.
const about = document.getElementById("about"), idle = about.textContent;
let marked = null;
function tell(event) {
  const token = event.target.closest ? event.target.closest("[data-ids] > b, [data-ids] > i") : null;
  if (marked) marked.classList.remove("at");
  marked = token;
  if (!token) { about.textContent = idle; return; }
  token.classList.add("at");
  const text = token.parentNode, ids = text.dataset.ids.split(" "), n = Number(token.dataset.n || 1);
  let at = 0;
  for (let before = token.previousElementSibling; before; before = before.previousElementSibling) at += Number(before.dataset.n || 1);
  const next = n > 1 ? token : token.nextElementSibling;
  const label = !token.nextElementSibling ? text.dataset.next : next.tagName === "B" ? ids[at + 1] : "-100";
  const weight = token.tagName === "B" ? "supervised with weight " + (token.dataset.w || "1") : "context";
  about.textContent = "token " + at + (n > 1 ? "–" + (at + n - 1) : "") + ", id " + ids.slice(at, at + n).join(" ") + ", " + weight + "; label here " + label + "; " + text.dataset.where;
}
document.addEventListener("pointerover", tell);
document.addEventListener("click", tell);
