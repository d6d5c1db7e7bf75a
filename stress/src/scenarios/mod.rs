//! Synthetic programs that fragment memory: small models of real programs.
//!
//! Each is sized by the available memory, so it shows the same on a small and a large device, and
//! is the same for the same seed. It ends with live blocks and a *probe*: one more request, no
//! larger than the free memory.

mod alternating;
mod images;
mod kv_cache;
mod sequences;
mod streams;

#[cfg(test)]
mod tests;

use std::str::FromStr;

use aquifer_trace::input::Program;
use aquifer_trace::{Random, Script};

/// One way to fragment memory.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Scenario {
    /// Its name on the command line.
    pub name: &'static str,
    /// A description of the program, in a sentence.
    pub summary: &'static str,
    /// Whether it has several streams.
    pub streams: bool,
    write: fn(u64, Random) -> Setup,
}

/// A program and its probe.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Setup {
    /// The program, which leaves blocks live.
    pub program: Program,
    /// Bytes of the probe.
    pub probe: u64,
    /// The stream of the probe: an index into the program's streams.
    pub probe_stream: u16,
}

/// All scenarios, in the order of the documentation.
pub const ALL: [Scenario; 5] = [
    Scenario::new(
        "alternating",
        "fills the device with 4 MiB blocks, frees every other one, then asks for a quarter of the device",
        alternating::write,
    ),
    Scenario::new(
        "sequences",
        "trains a transformer on sequences that get longer; the optimizer's state appears after the first step, among \
         what the shortest sequence left; then asks for four fifths of what is free",
        sequences::write,
    ),
    Scenario::new(
        "kv_cache",
        "serves chats whose KV caches grow by concatenation, each step a larger copy of the tensor before it, and end \
         at different lengths; then asks for four fifths of what is free",
        kv_cache::write,
    ),
    Scenario::new(
        "images",
        "trains a detector on images of varying sizes, keeping each step's features for the next ones to compare \
         with; then asks for four fifths of what is free",
        images::write,
    ),
    Scenario {
        streams: true,
        ..Scenario::new(
            "streams",
            "runs work on nine streams in turn, each with a workspace that it frees and a small result that it keeps; \
             then asks for a workspace on a tenth stream",
            streams::write,
        )
    },
];

impl FromStr for Scenario {
    type Err = String;

    fn from_str(name: &str) -> Result<Scenario, String> {
        ALL.into_iter().find(|scenario| scenario.name == name).ok_or_else(|| {
            format!("there is no scenario {name:?}; there are {}", ALL.map(|scenario| scenario.name).join(", "))
        })
    }
}

impl Scenario {
    const fn new(name: &'static str, summary: &'static str, write: fn(u64, Random) -> Setup) -> Scenario {
        Scenario { name, summary, streams: false, write }
    }

    /// The program for a device with `room` available bytes.
    pub fn setup(&self, room: u64, seed: u64) -> Setup {
        (self.write)(room, Random::new(seed))
    }
}

impl Setup {
    /// A program, followed by a request of `probe` bytes on the default stream.
    fn of(script: Script, probe: u64) -> Setup {
        Setup { program: script.finish(), probe: probe.max(1), probe_stream: 0 }
    }

    /// A program, followed by a request for most of the memory that is free at its end.
    fn most_of(script: Script, room: u64) -> Setup {
        let free = room.saturating_sub(script.live());
        Setup::of(script, share(free, 800))
    }
}

/// `thousandths` of `bytes`, at least 1.
fn share(bytes: u64, thousandths: u64) -> u64 {
    (bytes / 1000).saturating_mul(thousandths).max(1)
}
