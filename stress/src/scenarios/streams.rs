//! Streams that each need a large workspace, one after the other.

use super::{Scenario, Script, Setup, share};
use crate::random::Random;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "streams",
    summary: "runs work on nine streams in turn, each with a workspace that it frees and a small result that it keeps; then \
              asks for a workspace on a tenth stream",
    streams: true,
    write,
};

const STREAMS: u16 = 10;

fn write(room: u64, mut random: Random) -> Setup {
    let mut script = Script::new(SCENARIO.name, STREAMS);
    for stream in 0..STREAMS - 1 {
        // A little less each time, so that what the stream before left would do.
        let workspace = script.alloc_on(share(room, 180 - 10 * u64::from(stream)), stream);
        script.free(workspace);
        // The result splits the cached workspace, which then cannot go back to the device.
        script.alloc_on(random.size(share(room, 4), share(room, 9)), stream);
    }
    Setup { probe_stream: STREAMS - 1, ..script.then(share(room, 90)) }
}
