//! The records of an extended header, and the times in them. Pure.

/// A key and its value.
pub type Record<'a> = (&'a [u8], &'a [u8]);

/// Parses the records `length key=value\n` of an extended header.
///
/// # Errors
/// Returns a sentence if the bytes are not such records.
pub fn records(mut bytes: &[u8]) -> Result<Vec<Record<'_>>, &'static str> {
    const BROKEN: &str = "A pax header is damaged";
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let space = bytes.iter().take(8).position(|byte| *byte == b' ').ok_or(BROKEN)?;
        let length = std::str::from_utf8(&bytes[..space]).ok().and_then(|text| text.parse::<usize>().ok());
        let length = length.filter(|length| *length > space + 1 && *length <= bytes.len()).ok_or(BROKEN)?;
        let record = bytes[space + 1..length].strip_suffix(b"\n").ok_or(BROKEN)?;
        let equals = record.iter().position(|byte| *byte == b'=').ok_or(BROKEN)?;
        records.push((&record[..equals], &record[equals + 1..]));
        bytes = &bytes[length..];
    }
    Ok(records)
}

/// Appends one record.
pub fn record(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    // The length includes its own digits.
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    out.extend_from_slice(length.to_string().as_bytes());
    for part in [b" ", key, b"=", value, b"\n"] {
        out.extend_from_slice(part);
    }
}

/// Parses seconds with a fraction, also before 1970.
pub fn time(text: &[u8]) -> Option<(i64, u32)> {
    let text = std::str::from_utf8(text).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    if !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let nanoseconds: u32 = format!("{fraction:0<9}").get(..9)?.parse().ok()?;
    Some(match whole.starts_with('-') && nanoseconds > 0 {
        true => (seconds.checked_sub(1)?, 1_000_000_000 - nanoseconds),
        false => (seconds, nanoseconds),
    })
}

/// Formats a time such that [`time`] can parse it.
pub fn time_text((seconds, nanoseconds): (i64, u32)) -> String {
    let (sign, seconds, nanoseconds) = match seconds < 0 && nanoseconds > 0 {
        true => ("-", -(seconds + 1), 1_000_000_000 - nanoseconds),
        false => ("", seconds, nanoseconds),
    };
    let text = format!("{sign}{seconds}.{nanoseconds:09}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_counts_its_own_length() {
        for length in 0..2000 {
            let mut out = Vec::new();
            let value = vec![b'x'; length];
            record(&mut out, b"path", &value);
            assert_eq!(records(&out).unwrap(), [(&b"path"[..], &value[..])]);
        }
        for broken in [&b"5 a=b"[..], b"x a=b\n", b"99 a=b\n", b"6 ab\n\n", b"0 ", b"99999999999999999999 a=b\n"] {
            assert!(records(broken).is_err(), "{broken:?}");
        }
    }

    #[test]
    fn times_keep_their_fraction_on_both_sides_of_1970() {
        for time_given in [(0, 0), (1_731_751_200, 250_000_001), (-1, 500_000_000), (-2, 0), (-2, 999_999_999)] {
            assert_eq!(time(time_text(time_given).as_bytes()), Some(time_given));
        }
        assert_eq!(time(b"-0.5"), Some((-1, 500_000_000)));
        assert_eq!(time(b"12.1234567899"), Some((12, 123_456_789)));
        assert!(time(b"x").is_none() && time(b"1.x").is_none() && time(b"").is_none());
    }
}
