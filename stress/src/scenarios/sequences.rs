//! Training on sequences that get longer.

use aquifer_trace::{Random, Script};

use super::{Setup, share};

const LAYERS: usize = 24;
const STEPS: u64 = 40;

pub(super) fn write(room: u64, mut random: Random) -> Setup {
    let mut script = Script::new("sequences", 1);
    let weight = share(room, 90) / LAYERS as u64;
    for _ in 0..LAYERS {
        script.alloc(weight);
    }
    for step in 0..STEPS {
        // In thousandths of the longest: growing, as in a curriculum, with some spread.
        let length = (250 + 750 * step / STEPS + u64::from(random.below(80))).min(1000);
        let hidden = share(share(room, 500) / LAYERS as u64, length);
        let scores = share(share(share(room, 150) / LAYERS as u64, length), length);
        let scratch = share(share(room, 40), length);
        let mut saved = Vec::new();
        for _ in 0..LAYERS {
            let attention = script.alloc(scratch);
            saved.push(script.alloc(hidden));
            saved.push(script.alloc(scores));
            script.free(attention);
        }
        let mut gradients = Vec::new();
        while let Some(activation) = saved.pop() {
            if saved.len() % 2 == 1 {
                gradients.push(script.alloc(weight));
            }
            let gradient = script.alloc(hidden);
            script.free(activation);
            script.free(gradient);
        }
        if step == 0 {
            // Two moments for each weight, allocated when the optimizer first runs.
            for _ in 0..2 * LAYERS {
                script.alloc(weight);
            }
        }
        script.free_all(gradients);
    }
    Setup::most_of(script, room)
}
