//! Every other block is freed.

use super::{Scenario, Script, Setup};
use crate::random::Random;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "alternating",
    summary: "fills the device with 4 MiB blocks, frees every other one, then asks for a quarter of the device",
    streams: false,
    write,
};

/// Five of them share a segment of 20 MiB.
const BLOCK: u64 = 4 << 20;
/// The most memory that is filled with blocks; of a larger device the rest is taken in one piece.
const FILLED_MAX: u64 = 256 << 30;

fn write(room: u64, _: Random) -> Setup {
    let mut script = Script::new(SCENARIO.name, 1);
    let filled = room.min(FILLED_MAX);
    if room > filled {
        script.alloc(room - filled);
    }
    // Nineteen twentieths: programs leave some for the driver.
    let blocks: Vec<_> = (0..filled / 20 * 19 / BLOCK).map(|_| script.alloc(BLOCK)).collect();
    for (index, block) in blocks.into_iter().enumerate() {
        if index % 2 == 1 {
            script.free(block);
        }
    }
    script.then(filled / 4)
}
