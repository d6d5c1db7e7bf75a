//! Training on images of varying sizes.

use aquifer_trace::{Random, Script};

use super::{Setup, share};

/// Levels of the feature pyramid, and convolutions on each.
const LEVELS: u32 = 4;
const CONVOLUTIONS: u32 = 3;
const STEPS: u32 = 60;
/// The number of steps for which features are kept.
const KEPT: usize = 6;

pub(super) fn write(room: u64, mut random: Random) -> Setup {
    let mut script = Script::new("images", 1);
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
    Setup::most_of(script, room)
}
