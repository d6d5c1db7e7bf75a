//! Writes synthetic programs.

use crate::input::{Event, Program};

/// A program being written.
#[derive(Debug)]
pub struct Script {
    program: Program,
    /// Bytes of the block in each slot.
    bytes: Vec<u64>,
    empty: Vec<u32>,
    live: u64,
}

/// A live block of a script. A block whose handle is dropped stays live to the end of the program.
#[derive(Debug)]
pub struct Block(u32);

impl Script {
    /// An empty script with this number of streams.
    pub fn new(name: &str, streams: u16) -> Script {
        let program =
            Program { name: name.to_owned(), streams: (0..u64::from(streams)).collect(), ..Program::default() };
        Script { program, bytes: Vec::new(), empty: Vec::new(), live: 0 }
    }

    /// Allocates a block for the default stream.
    pub fn alloc(&mut self, bytes: u64) -> Block {
        self.alloc_on(bytes, 0)
    }

    /// Allocates a block for a stream; at least one byte.
    pub fn alloc_on(&mut self, bytes: u64, stream: u16) -> Block {
        let bytes = bytes.max(1);
        let slot = self.empty.pop().unwrap_or_else(|| {
            self.bytes.push(0);
            self.program.slots += 1;
            self.program.slots - 1
        });
        self.bytes[slot as usize] = bytes;
        self.live += bytes;
        self.program.peak_requested_bytes = self.program.peak_requested_bytes.max(self.live);
        self.program.events.push(Event::Alloc { slot, bytes, stream });
        Block(slot)
    }

    /// Another stream uses a block.
    pub fn use_on(&mut self, block: &Block, stream: u16) {
        self.program.events.push(Event::RecordStream { slot: block.0, stream });
    }

    /// Frees a block.
    pub fn free(&mut self, block: Block) {
        let Block(slot) = block;
        self.live -= self.bytes[slot as usize];
        self.empty.push(slot);
        self.program.events.push(Event::Free { slot });
    }

    /// Frees blocks, the first one first.
    pub fn free_all(&mut self, blocks: impl IntoIterator<Item = Block>) {
        blocks.into_iter().for_each(|block| self.free(block));
    }

    /// Bytes that are live.
    pub fn live(&self) -> u64 {
        self.live
    }

    /// The program.
    pub fn finish(self) -> Program {
        self.program
    }
}
