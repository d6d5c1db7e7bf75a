//! Training on images of varying sizes.

use super::{Scenario, Script, Setup, share};
use crate::random::Random;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "images",
    summary: "trains a detector on images of varying sizes, keeping each step's features for the next ones to \
              compare with; then asks for four fifths of what is free",
    streams: false,
    write,
};

/// Levels of the feature pyramid, and convolutions on each.
const LEVELS: u32 = 4;
const CONVOLUTIONS: u32 = 3;
const STEPS: u32 = 60;
/// For how many steps features are kept.
const KEPT: usize = 6;

fn write(room: u64, mut random: Random) -> Setup {
    let mut script = Script::new(SCENARIO.name, 1);
    script.alloc(share(room, 50));
    let mut kept = std::collections::VecDeque::new();
    for _ in 0..STEPS {
        let largest = random.size(share(room, 20), share(room, 120));
        let mut saved = Vec::new();
        for level in 0..LEVELS {
            for _ in 0..CONVOLUTIONS {
                let workspace = script.alloc(largest >> level);
                saved.push(script.alloc(largest >> level));
                script.free(workspace);
            }
            kept.push_back(script.alloc(largest >> (level + 3)));
        }
        while let Some(activation) = saved.pop() {
            script.free(activation);
        }
        while kept.len() > KEPT * LEVELS as usize
            && let Some(old) = kept.pop_front()
        {
            script.free(old);
        }
    }
    script.then_most_of(room)
}
