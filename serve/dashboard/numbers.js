// Numbers as people read them; – where there is none.

const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

const orNone = (format) => (value) => (value === null || value === undefined ? NONE : format(value));

export const count = orNone((value) => whole.format(value));
export const ratio = orNone((value) => value.toFixed(2));
export const percent = orNone((value) => `${(100 * value).toFixed(1)} %`);
export const rate = orNone((value) => value.toFixed(value < 100 ? 1 : 0));
export const seconds = orNone((value) => (value < 1 ? `${(1000 * value).toPrecision(3)} ms` : `${value.toPrecision(3)} s`));
export const span = (value) => (value < 90 ? `${Math.round(value)} seconds` : `${Math.round(value / 60)} minutes`);
