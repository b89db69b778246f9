"use strict";
// Asks every two seconds what is new and puts the parts that have changed in their places.
const EVERY_MS = 2000;
let known = 0, server = null;

async function ask() {
  const answer = await fetch(`/poll?known=${known}`);
  if (!answer.ok) throw new Error(answer.statusText);
  const news = await answer.json();
  if (server !== null && news.server !== server) location.reload(); // started again: its versions start from 0
  server = news.server;
  for (const [name, html] of Object.entries(news.parts)) document.getElementById(name).innerHTML = html;
  known = news.version;
  return news.more;
}

async function keepAsking() {
  let more = false;
  if (!document.hidden) {
    try {
      more = await ask();
      document.getElementById("away").hidden = true;
    } catch {
      document.getElementById("away").hidden = false;
    }
  }
  setTimeout(keepAsking, more ? 0 : EVERY_MS);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) ask().catch(() => {}); });
keepAsking();
