//! Tar archives out of short texts, so that mutations change what an archive says and not its checksums.
//!
//! ```text
//!   f 755 name=content     d 700 name/     s 777 name=target     h 644 name=target
//!   p - name               w - name        x - key=value (a pax record for the next one)
//!   l - name (a GNU long name for the next one)
//! ```
//! One member per line; `@` stands for the directory around the one that is unpacked into. An input that is an
//! archive itself, or a compressed one, is taken as it is, with the checksums of its headers made right.

use baton_files::tar::pax;

const BLOCK: usize = 512;

/// The bytes of an archive.
pub fn archive(data: &[u8], around: &str) -> Vec<u8> {
    let is_archive = data.get(257..262) == Some(b"ustar");
    let is_compressed = data.starts_with(&[0x1f, 0x8b]) || data.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
    if is_archive {
        let mut archive = data.to_vec();
        archive.chunks_exact_mut(BLOCK).filter(|block| block[257..262] == *b"ustar").for_each(set_checksum);
        return archive;
    }
    if is_compressed {
        return data.to_vec();
    }
    let mut archive = Vec::new();
    for line in data.split(|byte| *byte == b'\n') {
        add(&mut archive, line, around);
    }
    archive.extend([0; 2 * BLOCK]);
    archive
}

fn add(archive: &mut Vec<u8>, line: &[u8], around: &str) {
    let mut words = line.splitn(3, |byte| *byte == b' ');
    let (Some([kind]), Some(mode), Some(rest)) = (words.next(), words.next(), words.next()) else { return };
    let rest: Vec<u8> = rest
        .iter()
        .flat_map(|byte| if *byte == b'@' { around.as_bytes() } else { std::slice::from_ref(byte) })
        .copied()
        .collect();
    let (name, value) = match rest.iter().position(|byte| *byte == b'=') {
        Some(at) => (&rest[..at], &rest[at + 1..]),
        None => (&rest[..], &[][..]),
    };
    match kind {
        b'f' => member(archive, b'0', mode, name, b"", value),
        b'd' => member(archive, b'5', mode, name, b"", b""),
        b's' => member(archive, b'2', mode, name, value, b""),
        b'h' => member(archive, b'1', mode, name, value, b""),
        b'p' => member(archive, b'6', mode, name, b"", b""),
        b'w' => member(archive, b'3', mode, name, b"", b""),
        b'l' => member(archive, b'L', mode, b"././@LongLink", b"", &rest),
        b'x' => {
            let mut record = Vec::new();
            pax::record(&mut record, name, value);
            member(archive, b'x', mode, b"pax", b"", &record);
        }
        _ => {}
    }
}

fn member(archive: &mut Vec<u8>, kind: u8, mode: &[u8], name: &[u8], link: &[u8], content: &[u8]) {
    let mut block = [0; BLOCK];
    let mut put = |at: usize, most: usize, bytes: &[u8]| {
        let count = bytes.len().min(most);
        block[at..at + count].copy_from_slice(&bytes[..count]);
    };
    put(0, 100, name);
    put(100, 7, mode);
    put(108, 7, b"0000000");
    put(116, 7, b"0000000");
    put(124, 11, format!("{:011o}", content.len()).as_bytes());
    put(136, 11, b"07346545000");
    put(156, 1, &[kind]);
    put(157, 100, link);
    put(257, 8, b"ustar\x0000");
    put(329, 7, b"0000000");
    put(337, 7, b"0000000");
    set_checksum(&mut block);
    archive.extend(block);
    archive.extend(content);
    archive.resize(archive.len().next_multiple_of(BLOCK), 0);
}

fn set_checksum(block: &mut [u8]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}
