//! Makes text that a client, a sandbox or storage controls safe for terminals and logs: no character in it moves the
//! cursor, reorders the text around it or starts a new line.
//!
//! Only the output of a command is shown unchanged.

use std::borrow::Cow;

/// Whether a terminal only displays the character. Control characters (C0, DEL and C1) are not printable, nor are those
/// that break lines or change the direction of text: these can make a name that ends in `.exe` look like `exe.txt`.
pub fn is_printable(letter: char) -> bool {
    !letter.is_control()
        && !matches!(
            letter,
            '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}'
        )
}

/// Returns `text` as one line, with `?` for every character that is not printable.
pub fn printable(text: &str) -> String {
    printable_start(text, usize::MAX)
}

/// Like [`printable`], but keeps line breaks and tabs.
pub fn printable_lines(text: &str) -> String {
    text.chars()
        .map(|letter| if is_printable(letter) || matches!(letter, '\n' | '\t') { letter } else { '?' })
        .collect()
}

/// Returns at most the first `most` characters, as one line.
pub fn printable_start(text: &str, most: usize) -> String {
    text.chars().take(most).map(|letter| if is_printable(letter) { letter } else { '?' }).collect()
}

/// Escapes every such character in JSON: the meaning stays the same for programs, and terminals see plain text.
/// `serde_json` and log lines escape only C0, so everything below DEL stays unchanged.
pub fn escape_json(json: &str) -> Cow<'_, str> {
    let is_fit = |letter: char| letter < '\u{7f}' || is_printable(letter);
    if json.chars().all(is_fit) {
        return Cow::Borrowed(json);
    }
    let mut escaped = String::with_capacity(json.len() + 16);
    for letter in json.chars() {
        if is_fit(letter) {
            escaped.push(letter);
        } else {
            // Each of them is a single UTF-16 code unit.
            escaped.push_str(&format!("\\u{:04x}", letter as u32));
        }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every unprintable character, and its printable neighbours.
    fn hostile() -> impl Iterator<Item = char> {
        let bidirectional = ['\u{61c}', '\u{200e}', '\u{200f}'].into_iter();
        let more = ('\u{2028}'..='\u{202e}').chain('\u{2066}'..='\u{206f}');
        ('\0'..' ').chain('\u{7f}'..='\u{9f}').chain(bidirectional).chain(more)
    }

    #[test]
    fn what_moves_a_cursor_or_turns_text_round_is_not_printable_and_all_else_is() {
        assert!(hostile().all(|letter| !is_printable(letter)));
        for letter in
            ['a', ' ', '\u{a0}', 'é', '\u{61b}', '\u{61d}', '\u{200d}', '\u{2027}', '\u{202f}', '\u{2065}', '漢', '🦀']
        {
            assert!(is_printable(letter), "{letter:?}");
        }
        let count = ('\0'..=char::MAX).filter(|letter| !is_printable(*letter)).count();
        assert_eq!(count, hostile().count());
    }

    #[test]
    fn one_mark_stands_for_each_and_lines_stay_where_they_may() {
        for letter in hostile() {
            let text = format!("a{letter}b");
            assert_eq!(printable(&text), "a?b");
            let shown = printable_lines(&text);
            assert_eq!(shown, if matches!(letter, '\n' | '\t') { text.as_str() } else { "a?b" });
        }
        assert_eq!(printable_start("a\u{9b}é漢x", 4), "a?é漢");
    }

    #[test]
    fn escaped_json_means_the_same_and_is_printable() {
        for letter in hostile() {
            let value = serde_json::json!({ format!("k{letter}"): [format!("{letter}v"), "\\", "é"] });
            for json in [value.to_string(), format!("{value:#}")] {
                let escaped = escape_json(&json);
                assert_eq!(printable_lines(&escaped), escaped, "{letter:?}");
                assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap(), value);
            }
        }
        assert!(matches!(escape_json(r#"{"a":"é"}"#), Cow::Borrowed(_)));
    }
}
