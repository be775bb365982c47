/** Credentials for a proxy in front of the server, such as Cloud Run's access control. Node only. */

import type { Connection, HeaderSource } from "./connect.js";
import { variable } from "./environment.js";
import { AuthError, describe } from "./errors.js";

export function credentials(auth: Connection["auth"], address: string): HeaderSource {
  const chosen = auth ?? variable("BATON_AUTH") ?? "none";
  if (typeof chosen === "function") return chosen;
  if (chosen === "none") return () => ({});
  if (chosen !== "google") throw new AuthError(`auth must be "google" or a function, not \`${chosen}\``);
  // Cloud Run requires the address of the service as the audience.
  const { protocol, host } = new URL(address);
  return google(`${protocol === "ws:" ? "http" : "https"}://${host}`);
}

function google(audience: string): HeaderSource {
  // The client caches its token and renews it in time.
  let client: Promise<{ getRequestHeaders(url?: string): Promise<unknown> }> | undefined;
  return async () => {
    client ??= library().then(({ GoogleAuth }) => new GoogleAuth().getIdTokenClient(audience));
    try {
      const headers = await (await client).getRequestHeaders(audience);
      // A plain object in older versions of the library, `Headers` in newer ones.
      const pairs = headers instanceof Headers ? headers.entries() : Object.entries(headers as Record<string, string>);
      return Object.fromEntries(pairs) as Record<string, string>;
    } catch (error) {
      client = undefined;
      throw error instanceof AuthError ? error : new AuthError(`no Google ID token: ${describe(error)}`, { cause: error });
    }
  };
}

async function library(): Promise<typeof import("google-auth-library")> {
  try {
    return await import("google-auth-library");
  } catch (error) {
    throw new AuthError('auth: "google" needs google-auth-library: npm install google-auth-library', { cause: error });
  }
}
