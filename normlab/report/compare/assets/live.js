// The page while `--watch` serves it: request the data again, and draw them in place.

const POLL_MS = 1000;
const TIMEOUT_MS = 60000; // the first reading of many runs takes long
const mark = make("span", { id: "live", class: "badge no" }, "live");
byId("status").append(mark);
let etag = null;
let isPolling = false;

function showMark(isConnected) {
  const time = new Date(DATA.written * 1000).toLocaleTimeString();
  mark.textContent = `${isConnected ? "live" : "not connected"} · updated ${time}${DATA.error ? ` · ${DATA.error}` : ""}`;
  mark.className = `badge ${isConnected && !DATA.error ? "yes" : "bad"}`;
}

/** Request the data; null if they are those of the last request. */
async function request() {
  const headers = etag ? { "If-None-Match": etag } : {};
  const response = await fetch("data", { cache: "no-store", headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (response.status === 304) return null;
  if (!response.ok) throw new TypeError(response.statusText);
  etag = response.headers.get("ETag");
  return response.json();
}

async function poll() {
  // A page that nobody sees asks for nothing.
  if (isPolling || document.hidden || document.documentElement.dataset.ready !== "yes") return;
  isPolling = true;
  try {
    const data = await request().finally(() => (isPolling = false));
    // Another command may serve another page at this address.
    if (data && (data.command !== DATA.command || data.version !== DATA.version)) location.reload();
    else if (data) {
      useData(data);
      redraw();
    }
    showMark(true);
  } catch (error) {
    showMark(false);
    if (!(error instanceof TypeError || error instanceof DOMException)) console.error(error);
  }
}

setInterval(poll, POLL_MS);
document.addEventListener("visibilitychange", poll);
