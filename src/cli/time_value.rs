//! Times on the command line.

use std::time::Duration;

/// `30s`, `5m`, `1h30m`; a bare number is seconds.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let is_number = !text.is_empty() && text.chars().all(|c| c.is_ascii_digit() || c == '.');
    if is_number {
        let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
        return Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string());
    }
    humantime::parse_duration(text).map_err(|error| format!("{error}: write it as in `30s`, `5m` or `1h30m`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_number_is_seconds() {
        for (text, milliseconds) in [("1", 1000), ("0", 0), ("1.5", 1500), ("30s", 30_000), ("1m30s", 90_000)] {
            assert_eq!(parse_time(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["", "x", "1x", "-1", ".", "1.2.3", "99999999999999999999999"] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }
}
