//! Text that a client, a sandbox or storage controls, made fit for a terminal and a log: no character in it moves the
//! cursor, changes the order in which the others are read, or begins a new line.
//!
//! The output of a command is the one thing that is shown as it is.

use std::borrow::Cow;

/// Whether a terminal shows the character and nothing else. Control characters (C0, DEL and C1) do not, nor those that
/// break lines or change the direction of text: with them `exe.txt` is shown for a name that ends in `.exe`.
pub fn is_printable(letter: char) -> bool {
    !letter.is_control()
        && !matches!(
            letter,
            '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}'
        )
}

/// `text` in one line, with `?` for every character that is not printable.
pub fn printable(text: &str) -> String {
    text.chars().map(|letter| if is_printable(letter) { letter } else { '?' }).collect()
}

/// The same for text of several lines, which may have tabs.
pub fn printable_lines(text: &str) -> String {
    text.chars()
        .map(|letter| if is_printable(letter) || matches!(letter, '\n' | '\t') { letter } else { '?' })
        .collect()
}

/// At most the first `most` characters, in one line.
pub fn printable_start(text: &str, most: usize) -> String {
    text.chars().take(most).map(|letter| if is_printable(letter) { letter } else { '?' }).collect()
}

/// JSON in which every such character is escaped: it means the same to a program, and nothing to a terminal.
/// `serde_json` escapes C0 alone, and so do log lines: what is below DEL stays as it is.
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
            // All of them have one unit of UTF-16.
            escaped.push_str(&format!("\\u{:04x}", letter as u32));
        }
    }
    Cow::Owned(escaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every character that is not printable, and its neighbours that are.
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
