//! One valid archive, and the ways to change it: the same ones for the same case, every time.

use std::path::Path;

use baton::runtime::archive::Form;
use baton_files::tar::pax;
use tar::EntryType as T;

use crate::rootfs_archives::{ended, gzip, header, raw};

const BLOCK: usize = 512;

/// Numbers by chance, the same for the same case.
struct Rng(u64);

impl Rng {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.roll() % end.max(1) as u64) as usize
    }

    fn pick<'a, I>(&mut self, of: &'a [I]) -> &'a I {
        &of[self.below(of.len())]
    }
}

/// Everything that an archive of ours or of others may hold.
pub fn valid() -> Vec<u8> {
    let mut archive = Vec::new();
    let mut add = |kind, name: &[u8], link: &[u8], content: &[u8]| raw(&mut archive, kind, name, link, content);
    add(T::Directory, b"./", b"", b"");
    add(T::Directory, b"./etc/", b"", b"");
    add(T::Regular, b"./etc/passwd", b"", b"root:x:0:0::/root:/bin/sh\n");
    add(T::Link, b"./etc/hard", b"./etc/passwd", b"");
    add(T::Symlink, b"./way", b"/", b"");
    add(T::Symlink, b"./up", b"../../../..", b"");
    add(T::Directory, b"./a/b/c/d/", b"", b"");
    add(T::Symlink, b"./deep", b"a/b/c/d", b"");
    add(T::Regular, b"./deep/file", b"", &[7; 700]);
    add(T::GNULongName, b"././@LongLink", b"", &[&[b'n'; 200][..], b"\0"].concat());
    add(T::Regular, b"nnnn", b"", b"long");
    let mut records = Vec::new();
    pax::record(&mut records, b"path", "etc/\u{fc}n\u{ef}".as_bytes());
    pax::record(&mut records, b"mtime", b"1700000000.5");
    pax::record(&mut records, b"SCHILY.xattr.user.colour", b"bl\0ue\n");
    add(T::XHeader, b"x", b"", &records);
    add(T::Regular, b"un", b"", b"unicode");
    add(T::Fifo, b"./fifo", b"", b"");
    add(T::Block, b"./disk", b"", b"");
    let mut records = Vec::new();
    pax::record(&mut records, b"SCHILY.xattr.trusted.overlay.opaque", b"y");
    add(T::XHeader, b"x", b"", &records);
    add(T::Directory, b"./etc/", b"", b"");
    let mut gone = header(T::Char, 0);
    gone.as_old_mut().name[..6].copy_from_slice(b"./gone");
    gone.set_device_major(0).unwrap();
    gone.set_device_minor(0).unwrap();
    gone.set_cksum();
    archive.extend_from_slice(gone.as_bytes());
    let mut sparse = header(T::GNUSparse, 512);
    let gnu = sparse.as_gnu_mut().unwrap();
    gnu.set_real_size(100_000);
    gnu.sparse[0].set_offset(40_960);
    gnu.sparse[0].set_length(512);
    sparse.as_old_mut().name[..6].copy_from_slice(b"sparse");
    sparse.set_cksum();
    archive.extend_from_slice(sparse.as_bytes());
    archive.extend_from_slice(&[9; 512]);
    ended(archive)
}

/// What names and links are changed into.
pub fn names(outside: &Path) -> Vec<Vec<u8>> {
    let told = outside.as_os_str().as_encoded_bytes();
    let mut names: Vec<Vec<u8>> = [
        "",
        ".",
        "..",
        "/",
        "../secret",
        "a/../../secret",
        "way",
        "way/way/x",
        "way/etc/passwd",
        "up",
        "up/x",
        "deep/x/y/z",
        "deep/deep",
        "etc",
        "etc/",
        "etc/passwd",
        "etc/hard/x",
        "etc/gone",
        "fifo",
        "fifo/x",
        "tmp",
        "tmp/.keep",
        "dev",
        "dev/pts",
        "proc/self/root",
        ".baton",
        "gone",
        "\u{fc}",
        "a b\n",
        "./././x",
        "x//y",
    ]
    .map(|name| name.as_bytes().to_vec())
    .to_vec();
    names.push(told.to_vec());
    names.push([told, b"/secret"].concat());
    names.push([b"../".repeat(20), told[1..].to_vec()].concat());
    names.push(vec![b'z'; 300]);
    names.push(b"d/".repeat(40));
    names.push(vec![0xff, 0xfe, b'/', 0x80]);
    names
}

/// Where a header says what: name, mode, owners, size, time, kind, link, magic, device, prefix, sparse map.
const FIELDS: [(usize, usize); 16] = [
    (0, 100),
    (0, 100),
    (100, 8),
    (108, 8),
    (116, 8),
    (124, 12),
    (136, 12),
    (156, 1),
    (156, 1),
    (157, 100),
    (157, 100),
    (257, 8),
    (329, 16),
    (345, 155),
    (386, 96),
    (482, 13),
];

/// Another value in one header, whose sum is right again: so that more than the first check looks at it.
fn twist(rng: &mut Rng, archive: &mut [u8], names: &[Vec<u8>]) {
    let at = rng.below(archive.len() / BLOCK) * BLOCK;
    let block = &mut archive[at..at + BLOCK];
    let (start, length) = *rng.pick(&FIELDS);
    let field = &mut block[start..start + length];
    match rng.below(4) {
        _ if length == 1 => field[0] = *rng.pick(b"01234567LKxgSZVDM\0"),
        0 => field.iter_mut().for_each(|byte| *byte = rng.roll() as u8),
        1 => {
            let numbers: [u64; 11] =
                [0, 1, 511, 512, 513, 4096, 1 << 20, (1 << 20) + 1, 0o7777, 0o177_777, (1 << 33) - 1];
            let text = format!("{:0width$o}\0", rng.pick(&numbers), width = length - 1);
            field.copy_from_slice(&text.as_bytes()[text.len() - length..]);
        }
        2 => {
            field.fill(if rng.below(2) == 0 { 0 } else { 0xff });
            field[0] = 0x80;
        }
        _ => {
            let name = rng.pick(names);
            let most = name.len().min(length);
            field.fill(0);
            field[..most].copy_from_slice(&name[..most]);
        }
    }
    sum(block);
}

fn sum(block: &mut [u8]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// Something more to say about whatever comes next.
fn insert(rng: &mut Rng, archive: &mut Vec<u8>, names: &[Vec<u8>]) {
    let keys: [&[u8]; 12] = [
        b"path",
        b"path",
        b"linkpath",
        b"linkpath",
        b"size",
        b"uid",
        b"gid",
        b"mtime",
        b"GNU.sparse.major",
        b"SCHILY.xattr.user.x",
        b"SCHILY.xattr.trusted.overlay.opaque",
        b"SCHILY.xattr.security.capability",
    ];
    let numbers: [&[u8]; 6] = [b"0", b"-1", b"512", b"18446744073709551615", b"-9223372036854775808.9", b"y"];
    let value = if rng.below(2) == 0 { rng.pick(&numbers).to_vec() } else { rng.pick(names).clone() };
    let mut records = Vec::new();
    let key = rng.pick(&keys);
    pax::record(&mut records, key, &value);
    let mut more = Vec::new();
    let long = [T::XHeader, T::XHeader, T::XHeader, T::GNULongName, T::GNULongLink, T::XGlobalHeader];
    let kind = *rng.pick(&long);
    let is_name = matches!(kind, T::GNULongName | T::GNULongLink);
    raw(&mut more, kind, b"x", b"", if is_name { &value } else { &records });
    let at = rng.below(archive.len() / BLOCK + 1) * BLOCK;
    archive.splice(at..at, more);
}

/// What knows nothing of archives.
fn damage(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let at = rng.below(bytes.len());
    let block = |at: usize, bytes: &[u8]| at / BLOCK * BLOCK..(at / BLOCK * BLOCK + BLOCK).min(bytes.len());
    let here = block(at, bytes);
    match rng.below(6) {
        _ if bytes.is_empty() => {}
        0 => bytes[at] ^= 1 << rng.below(8),
        1 => bytes[at] = rng.roll() as u8,
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(here)),
        4 => {
            let again = bytes[here].to_vec();
            let to = rng.below(bytes.len() / BLOCK + 1) * BLOCK;
            let to = to.min(bytes.len());
            bytes.splice(to..to, again);
        }
        _ => {
            let other = block(rng.below(bytes.len()), bytes);
            let (one, two) = (bytes[here.clone()].to_vec(), bytes[other.clone()].to_vec());
            if one.len() == two.len() {
                bytes[here].copy_from_slice(&two);
                bytes[other].copy_from_slice(&one);
            }
        }
    }
}

/// The archive of one case, and what it is taken for.
pub fn mutant(case: u64, valid: &[u8], names: &[Vec<u8>]) -> (Vec<u8>, Form) {
    let mut rng = Rng(case);
    let mut archive = valid.to_vec();
    let form = *rng.pick(&[Form::Layer, Form::Complete, Form::Base]);
    let packing = rng.below(8);
    // Half of those that are packed are changed only after that.
    if packing < 6 {
        for _ in 0..=rng.below(4) {
            match rng.below(8) {
                0..=3 => twist(&mut rng, &mut archive, names),
                4 | 5 => insert(&mut rng, &mut archive, names),
                _ => damage(&mut rng, &mut archive),
            }
            if archive.len() < BLOCK {
                break;
            }
        }
    }
    match packing {
        4 | 6 => archive = gzip(&archive),
        5 | 7 => archive = zstd::encode_all(&archive[..], 1).unwrap(),
        _ => {}
    }
    if packing >= 6 {
        damage(&mut rng, &mut archive);
    }
    (archive, form)
}
