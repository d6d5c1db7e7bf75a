//! Programs that fragment memory, made up: small models of what real programs do.
//!
//! Each is sized by the memory that it may use, so it shows the same on a small device and a large
//! one, and is the same for the same seed. It ends with blocks live and a *probe*: one more
//! request, no larger than what is free by then.

mod alternating;
mod images;
mod kv_cache;
mod script;
mod sequences;
mod streams;

#[cfg(test)]
mod tests;

pub use script::{Block, Script};

use crate::input::Program;
use crate::random::Random;

/// One way to fragment memory.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Scenario {
    /// Its name on the command line.
    pub name: &'static str,
    /// What the program does, in a sentence.
    pub summary: &'static str,
    /// Whether it has several streams, so that reuse between them matters.
    pub streams: bool,
    write: fn(u64, Random) -> Setup,
}

/// A program, and the request that follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Setup {
    /// What happens first; leaves blocks live.
    pub program: Program,
    /// Bytes of the request that comes after it.
    pub probe: u64,
    /// The stream of that request: an index into the program's.
    pub probe_stream: u16,
}

/// All scenarios, in the order in which they are best read.
pub const ALL: [Scenario; 5] =
    [alternating::SCENARIO, sequences::SCENARIO, kv_cache::SCENARIO, images::SCENARIO, streams::SCENARIO];

impl Scenario {
    /// The program for a device with `room` bytes to use.
    pub fn setup(&self, room: u64, seed: u64) -> Setup {
        (self.write)(room, Random::new(seed))
    }
}

impl Script {
    /// The program, followed by a request of `probe` bytes on the default stream.
    fn then(self, probe: u64) -> Setup {
        Setup { program: self.finish(), probe: probe.max(1), probe_stream: 0 }
    }

    /// The program, followed by a request for most of what is not live at its end.
    fn then_most_of(self, room: u64) -> Setup {
        let free = room.saturating_sub(self.live());
        self.then(share(free, 800))
    }
}

/// `thousandths` of `bytes`, at least 1.
fn share(bytes: u64, thousandths: u64) -> u64 {
    (bytes / 1000).saturating_mul(thousandths).max(1)
}
