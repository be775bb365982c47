/** CRC-32 as in zlib: browsers have none, and Node has it only since version 22. */

const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let rest = byte;
  for (let bit = 0; bit < 8; bit++) rest = rest & 1 ? 0xedb88320 ^ (rest >>> 1) : rest >>> 1;
  return rest;
});

/** The checksum of `data` after bytes whose checksum is `before`. */
export function crc32(data: Uint8Array, before = 0): number {
  let rest = ~before;
  for (const byte of data) rest = TABLE[(rest ^ byte) & 0xff]! ^ (rest >>> 8);
  return ~rest >>> 0;
}
