//! Output whose every byte is known: a lost, doubled or reordered one is seen where it happens.

use anyhow::{Result, bail};

const BLOCK: usize = 64 << 10;

/// Python that writes `blocks` blocks to stdout, each with its number in front.
pub fn code(blocks: u64) -> String {
    format!(
        "import os\n\
         body = bytes(32 + i % 89 for i in range({BLOCK} - 16))\n\
         for i in range(0, {blocks}, 16):\n\
         \tv = memoryview(b''.join(b'%015d\\n' % n + body for n in range(i, min(i + 16, {blocks}))))\n\
         \twhile v: v = v[os.write(1, v):]\n"
    )
}

/// What of the tape has come so far.
#[derive(Debug)]
pub struct Tape {
    block: Vec<u8>,
    next: u64,
    end: u64,
}

impl Tape {
    pub fn new(blocks: u64) -> Self {
        let mut block = vec![0; 16];
        block.extend((0..BLOCK - 16).map(|at| 32 + (at % 89) as u8));
        Self { block, next: 0, end: blocks * BLOCK as u64 }
    }

    pub fn len(&self) -> u64 {
        self.end
    }

    /// Compares the next bytes with what must come.
    pub fn read(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let at = (self.next % BLOCK as u64) as usize;
            if at == 0 || self.next == 0 {
                self.block[..16].copy_from_slice(format!("{:015}\n", self.next / BLOCK as u64).as_bytes());
            }
            let count = bytes.len().min(BLOCK - at);
            if bytes[..count] != self.block[at..at + count] {
                bail!("wrong bytes in the output at {}..{}", self.next, self.next + count as u64);
            }
            self.next += count as u64;
            bytes = &bytes[count..];
        }
        Ok(())
    }

    pub fn finish(&self) -> Result<()> {
        if self.next != self.end {
            bail!("{} bytes of output came, and {} were written", self.next, self.end);
        }
        Ok(())
    }
}
