//! One block of 512 bytes, and the numbers and records in it. Pure.

use super::{BLOCK, Kind, Member};

const NAME: std::ops::Range<usize> = 0..100;
const MODE: std::ops::Range<usize> = 100..108;
const UID: std::ops::Range<usize> = 108..116;
const GID: std::ops::Range<usize> = 116..124;
const SIZE: std::ops::Range<usize> = 124..136;
const MTIME: std::ops::Range<usize> = 136..148;
const SUM: std::ops::Range<usize> = 148..156;
const TYPE: usize = 156;
const LINK: std::ops::Range<usize> = 157..257;
const MAGIC: std::ops::Range<usize> = 257..263;
const PREFIX: std::ops::Range<usize> = 345..500;

pub(super) type Block = [u8; BLOCK];

/// What fits into a name field.
pub(super) const SHORT: usize = 100;
/// What fits into eleven octal digits.
pub(super) const MOST_SIZE: u64 = (1 << 33) - 1;

/// What a header says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Member(Kind),
    /// Records about the next member.
    Pax,
    /// Records about all members.
    PaxGlobal,
    GnuLongName,
    GnuLongLink,
}

/// A header as its block says it.
#[derive(Debug)]
pub(super) struct Header {
    pub kind: Type,
    /// Bytes that follow, also where the member itself has none.
    pub size: u64,
    pub member: Member,
}

pub(super) fn decode(block: &Block) -> Result<Header, &'static str> {
    let told = number(&block[SUM]).ok_or("A header has no checksum")?;
    let sum = |signed: bool| -> i64 {
        let value = |byte: u8| if signed { i64::from(byte as i8) } else { i64::from(byte) };
        let place = |(at, byte): (usize, &u8)| if SUM.contains(&at) { 32 } else { value(*byte) };
        block.iter().enumerate().map(place).sum()
    };
    if told != sum(false) && told != sum(true) {
        return Err("Not a tar archive, or a damaged one");
    }
    let mut name = text(&block[NAME]).to_vec();
    if block[MAGIC] == *b"ustar\0" && block[PREFIX][0] != 0 {
        name = [text(&block[PREFIX]), b"/", &name].concat();
    }
    let kind = match block[TYPE] {
        b'x' => Type::Pax,
        b'g' => Type::PaxGlobal,
        b'L' => Type::GnuLongName,
        b'K' => Type::GnuLongLink,
        b'0' | b'\0' | b'7' => Type::Member(Kind::File),
        b'1' => Type::Member(Kind::HardLink),
        b'2' => Type::Member(Kind::Symlink),
        b'5' => Type::Member(Kind::Directory),
        _ => Type::Member(Kind::Other),
    };
    // Devices and pipes have no data, whatever they say; of what nobody knows the size is believed.
    let has_data = !matches!(block[TYPE], b'1'..=b'6');
    let size = number(&block[SIZE]).and_then(|size| u64::try_from(size).ok()).ok_or("A member has no size")?;
    let member = Member {
        name,
        kind: if let Type::Member(kind) = kind { kind } else { Kind::Other },
        mode: number(&block[MODE]).unwrap_or(0o644) as u32 & 0o7777,
        size: if kind == Type::Member(Kind::File) { size } else { 0 },
        mtime: (number(&block[MTIME]).unwrap_or(0), 0),
        link: text(&block[LINK]).to_vec(),
    };
    Ok(Header { kind, size: if has_data { size } else { 0 }, member })
}

/// Names are cut to what fits: the caller has written a pax header for longer ones.
pub(super) fn encode(member: &Member, kind: u8) -> Block {
    let mut block = [0; BLOCK];
    let mut put = |place: std::ops::Range<usize>, bytes: &[u8]| {
        let count = bytes.len().min(place.len());
        block[place.start..place.start + count].copy_from_slice(&bytes[..count]);
    };
    put(NAME, &member.name);
    put(MODE, format!("{:07o}", member.mode & 0o7777).as_bytes());
    put(UID, b"0000000");
    put(GID, b"0000000");
    put(SIZE, format!("{:011o}", member.size.min(MOST_SIZE)).as_bytes());
    let seconds = u64::try_from(member.mtime.0).unwrap_or(0).min(MOST_SIZE);
    put(MTIME, format!("{seconds:011o}").as_bytes());
    put(SUM, b"        ");
    put(TYPE..TYPE + 1, &[kind]);
    put(LINK, &member.link);
    put(MAGIC.start..MAGIC.end + 2, b"ustar\x0000");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[SUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Octal digits, or GNU's binary numbers. An empty field is nought.
fn number(field: &[u8]) -> Option<i64> {
    let (first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        let start = if first & 0x40 != 0 { -1 } else { i64::from(first & 0x3f) };
        return rest.iter().try_fold(start, |sum, byte| sum.checked_mul(256)?.checked_add(i64::from(*byte)));
    }
    let digits = field.iter().skip_while(|byte| **byte == b' ').take_while(|byte| !matches!(**byte, b' ' | 0));
    digits.copied().try_fold(0i64, |sum, digit| match digit {
        b'0'..=b'7' => sum.checked_mul(8)?.checked_add(i64::from(digit - b'0')),
        _ => None,
    })
}

/// A key and its value.
pub(super) type Record<'a> = (&'a [u8], &'a [u8]);

/// The records `length key=value\n` of a pax header.
pub(super) fn records(mut bytes: &[u8]) -> Result<Vec<Record<'_>>, &'static str> {
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

pub(super) fn record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    // The length counts its own digits.
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    out.extend_from_slice(format!("{length} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

/// Seconds with a fraction, also before 1970.
pub(super) fn time(text: &[u8]) -> Option<(i64, u32)> {
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

pub(super) fn time_text((seconds, nanoseconds): (i64, u32)) -> String {
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
    fn numbers_are_octal_or_binary() {
        assert_eq!(number(b"0000644\0"), Some(0o644));
        assert_eq!(number(b"   644 \0"), Some(0o644));
        assert_eq!(number(b"\0\0\0\0"), Some(0));
        assert_eq!(number(b"\x80\0\0\0\0\0\0\x02\0\0\0\0"), Some(2 << 32));
        assert_eq!(number(&[0xff; 12]), Some(-1));
        assert_eq!(number(b"\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), None);
        assert_eq!(number(b"12a"), None);
    }

    #[test]
    fn a_record_counts_its_own_length() {
        for length in 0..2000 {
            let mut out = Vec::new();
            let value = vec![b'x'; length];
            record(&mut out, "path", &value);
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
