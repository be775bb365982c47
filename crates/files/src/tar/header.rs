//! One block of 512 bytes, and the numbers and records in it. Pure.

use super::{BLOCK, Member, MemberKind};

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

/// The length of a name field.
pub(super) const NAME_LENGTH: usize = 100;
/// The largest number with eleven octal digits.
pub(super) const MOST_SIZE: u64 = (1 << 33) - 1;

/// The type of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Member(MemberKind),
    /// Records that apply to the next member.
    Pax,
    /// Records that apply to all members.
    PaxGlobal,
    GnuLongName,
    GnuLongLink,
}

/// A parsed header block.
#[derive(Debug)]
pub(super) struct Header {
    pub kind: Type,
    /// The number of bytes that follow, even where the member itself has no data.
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
        b'0' | b'\0' | b'7' => Type::Member(MemberKind::File),
        b'1' => Type::Member(MemberKind::HardLink),
        b'2' => Type::Member(MemberKind::Symlink),
        b'5' => Type::Member(MemberKind::Directory),
        _ => Type::Member(MemberKind::Other),
    };
    // Devices and pipes have no data, whatever size they state; the size of an unknown type is trusted.
    let has_data = !matches!(block[TYPE], b'1'..=b'6');
    let size = number(&block[SIZE]).and_then(|size| u64::try_from(size).ok()).ok_or("A member has no size")?;
    let member = Member {
        name,
        kind: if let Type::Member(kind) = kind { kind } else { MemberKind::Other },
        mode: number(&block[MODE]).unwrap_or(0o644) as u32 & 0o7777,
        size: if kind == Type::Member(MemberKind::File) { size } else { 0 },
        mtime: (number(&block[MTIME]).unwrap_or(0), 0),
        link: text(&block[LINK]).to_vec(),
    };
    Ok(Header { kind, size: if has_data { size } else { 0 }, member })
}

/// Truncates names to the field: for longer ones the caller has written a pax header.
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

/// Parses octal digits, or GNU's binary numbers. An empty field is zero.
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
}
