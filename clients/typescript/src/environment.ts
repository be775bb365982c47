/** What differs between environments: variables of the process, and symbols that older browsers lack. */

// Older browsers have no symbol for `await using`; compiled code looks for this one.
if (!Symbol.asyncDispose) {
  Object.defineProperty(Symbol, "asyncDispose", { value: Symbol.for("Symbol.asyncDispose") });
}

/** An environment variable; a browser has none. */
export function variable(name: string): string | undefined {
  return typeof process === "undefined" ? undefined : process.env?.[name] || undefined;
}
