// Requests to our own server: the key they carry, and the data of server-sent events. EventSource can send no key.

const KEY = "draftloop-key", ADMIN_KEY = "draftloop-admin-key";

export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));
export const setAdminKey = (key) => sessionStorage.setItem(ADMIN_KEY, key);
export const hasAdminKey = () => Boolean(sessionStorage.getItem(ADMIN_KEY));

export const ask = (path, how) => askWith(sessionStorage.getItem(KEY), path, how);
export const askAsOperator = (path, how) => askWith(sessionStorage.getItem(ADMIN_KEY) ?? sessionStorage.getItem(KEY), path, how);

function askWith(key, path, { headers = {}, ...more } = {}) {
  const carried = key ? { Authorization: `Bearer ${key}` } : {};
  return fetch(path, { ...more, headers: { ...headers, ...carried } });
}

// The message of an answer that is an error, as OpenAI's bodies have it.
export async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

export async function* dataOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split(/\r?\n\r?\n/);
      rest = events.pop();
      for (const event of events) {
        const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have broken off by itself
  }
}
