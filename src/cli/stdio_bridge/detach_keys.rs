//! The keys that leave a command running and give the terminal back, as with Docker.

use bytes::Bytes;

/// The default, as with Docker.
pub const DEFAULT: &str = "ctrl-p,ctrl-q";

/// A sequence of keys, none of which is passed on if all of them are pressed. Empty: there is no such sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DetachKeys(Vec<u8>);

/// Parses `ctrl-p,ctrl-q`: single characters, or `ctrl-` and a letter or one of `@[\]^_`.
pub fn parse_keys(text: &str) -> Result<DetachKeys, String> {
    if text.is_empty() {
        return Ok(DetachKeys::default());
    }
    text.split(',').map(parse_key).collect::<Result<_, _>>().map(DetachKeys)
}

fn parse_key(text: &str) -> Result<u8, String> {
    let single = |text: &str| match text.as_bytes() {
        [byte] if byte.is_ascii() => Some(*byte),
        _ => None,
    };
    let control = |byte: u8| match byte.to_ascii_uppercase() {
        upper @ b'@'..=b'_' => Some(upper - b'@'),
        _ => None,
    };
    let key = match text.strip_prefix("ctrl-") {
        Some(rest) => single(rest).and_then(control),
        None => single(text),
    };
    key.ok_or_else(|| format!("`{text}` is not a key: write them as in `ctrl-p,ctrl-q` or `ctrl-a,d`"))
}

/// Finds the keys in what is typed.
#[derive(Debug)]
pub struct KeyFilter {
    keys: DetachKeys,
    /// How many of the keys were pressed last. They are held back until the next key.
    matched: usize,
}

impl KeyFilter {
    pub fn new(keys: DetachKeys) -> Self {
        Self { keys, matched: 0 }
    }

    /// What to pass on, and whether the keys were pressed. Nothing counts that was typed after them.
    pub fn feed(&mut self, typed: Bytes) -> (Bytes, bool) {
        let keys = &self.keys.0;
        if keys.is_empty() {
            return (typed, false);
        }
        let mut passed = Vec::with_capacity(typed.len());
        for byte in typed {
            if byte != keys[self.matched] {
                passed.extend_from_slice(&keys[..self.matched]);
                self.matched = 0;
            }
            if byte == keys[self.matched] {
                self.matched += 1;
            } else {
                passed.push(byte);
            }
            if self.matched == keys.len() {
                return (passed.into(), true);
            }
        }
        (passed.into(), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(keys: &str, typed: &[&[u8]]) -> (Vec<u8>, bool) {
        let mut filter = KeyFilter::new(parse_keys(keys).unwrap());
        let mut passed = Vec::new();
        for bytes in typed {
            let (more, is_over) = filter.feed(Bytes::copy_from_slice(bytes));
            passed.extend_from_slice(&more);
            if is_over {
                return (passed, true);
            }
        }
        (passed, false)
    }

    #[test]
    fn keys_are_written_as_docker_has_them() {
        assert_eq!(parse_keys(DEFAULT), Ok(DetachKeys(vec![0x10, 0x11])));
        assert_eq!(parse_keys("ctrl-A,d"), Ok(DetachKeys(vec![1, b'd'])));
        assert_eq!(parse_keys("ctrl-]"), Ok(DetachKeys(vec![0x1d])));
        assert_eq!(parse_keys(""), Ok(DetachKeys::default()));
        for text in ["ctrl-", "ctrl-1", "ab", "ä", "a,,b"] {
            assert!(parse_keys(text).is_err(), "{text}");
        }
    }

    #[test]
    fn only_the_whole_sequence_is_swallowed_also_in_pieces() {
        assert_eq!(feed(DEFAULT, &[b"ls\r"]), (b"ls\r".to_vec(), false));
        assert_eq!(feed(DEFAULT, &[b"a\x10", b"\x11b"]), (b"a".to_vec(), true));
        assert_eq!(feed(DEFAULT, &[b"a\x10b"]), (b"a\x10b".to_vec(), false));
        assert_eq!(feed(DEFAULT, &[b"\x10\x10\x11"]), (b"\x10".to_vec(), true));
        assert_eq!(feed("a,b", &[b"aab"]), (b"a".to_vec(), true));
        assert_eq!(feed("", &[b"\x10\x11"]), (b"\x10\x11".to_vec(), false));
    }
}
