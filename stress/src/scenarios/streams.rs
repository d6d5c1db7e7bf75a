//! Streams that need a large workspace, one after the other.

use aquifer_trace::{Random, Script};

use super::{Setup, share};

const STREAMS: u16 = 10;

pub(super) fn write(room: u64, mut random: Random) -> Setup {
    let mut script = Script::new("streams", STREAMS);
    for stream in 0..STREAMS - 1 {
        // A little less each time, so that the previous stream's workspace would suffice.
        let workspace = script.alloc_on(share(room, 180 - 10 * u64::from(stream)), stream);
        script.free(workspace);
        // The result splits the cached workspace, which then cannot be released.
        script.alloc_on(random.size(share(room, 4), share(room, 9)), stream);
    }
    Setup { probe_stream: STREAMS - 1, ..Setup::of(script, share(room, 90)) }
}
