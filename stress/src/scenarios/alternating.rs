//! Frees every other block.

use aquifer_trace::{Random, Script};

use super::Setup;

/// Five of them share a segment of 20 MiB.
const BLOCK: u64 = 4 << 20;
/// The most memory that is filled with small blocks; the rest of a larger device is one block.
const FILLED_MAX: u64 = 256 << 30;

pub(super) fn write(room: u64, _: Random) -> Setup {
    let mut script = Script::new("alternating", 1);
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
    Setup::of(script, filled / 4)
}
