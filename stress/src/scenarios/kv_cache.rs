//! KV caches that grow by concatenation.

use std::collections::VecDeque;

use super::{Block, Scenario, Script, Setup};
use crate::random::Random;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "kv_cache",
    summary: "serves chats whose KV caches grow by concatenation, each step a larger copy of the tensor before it, and end \
              at different lengths; then asks for four fifths of what is free",
    streams: false,
    write,
};

/// Tensors of a chat: a key and a value for each of so many layers.
const TENSORS: u64 = 32;
/// What a tensor grows by in a step.
const GROWTH: u64 = 1200 << 10;
/// The longest that a chat may get, in steps: below 10 MiB, so that tensors share segments.
const LONGEST: u64 = 8;
const ROUNDS: u32 = 12;
/// The most memory that is given to chats; the model takes the rest.
const FILLED_MAX: u64 = 32 << 30;

struct Chat {
    tensors: VecDeque<Block>,
    steps: u64,
    ends: u64,
}

fn write(room: u64, mut random: Random) -> Setup {
    let mut script = Script::new(SCENARIO.name, 1);
    let filled = (room / 10 * 4).min(FILLED_MAX);
    // The model's weights.
    script.alloc((room / 100 * 96).saturating_sub(filled));
    let most = filled / 100 * 92 / (TENSORS * GROWTH);
    let mut chats: Vec<Chat> = Vec::new();
    for _ in 0..ROUNDS {
        loop {
            let ends = 2 + u64::from(random.below(7));
            chats.push(Chat { tensors: VecDeque::new(), steps: 0, ends });
            if most_steps(&chats) > most {
                chats.pop();
                break;
            }
        }
        chats.iter_mut().for_each(|chat| grow(&mut script, chat));
        for chat in chats.extract_if(.., |chat| chat.steps == chat.ends) {
            script.free_all(chat.tensors);
        }
    }
    // Towards the evening most of them end.
    for chat in chats.into_iter().filter(|_| random.below(5) > 1) {
        script.free_all(chat.tensors);
    }
    script.then_most_of(room)
}

/// One step of a chat: each tensor is copied to a larger one.
fn grow(script: &mut Script, chat: &mut Chat) {
    chat.steps += 1;
    for _ in 0..TENSORS {
        let longer = script.alloc(chat.steps * GROWTH);
        if chat.steps > 1
            && let Some(old) = chat.tensors.pop_front()
        {
            script.free(old);
        }
        chat.tensors.push_back(longer);
    }
}

/// How long all chats together will be at most: the program serves no more of them than fit.
fn most_steps(chats: &[Chat]) -> u64 {
    let at = |later: u64| -> u64 {
        chats
            .iter()
            .map(|chat| chat.steps + later)
            .zip(chats)
            .filter(|(steps, chat)| *steps <= chat.ends)
            .map(|(steps, _)| steps)
            .sum()
    };
    (1..=LONGEST).map(at).max().unwrap_or(0)
}
