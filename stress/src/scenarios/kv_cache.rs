//! KV caches that grow by concatenation.

use std::collections::VecDeque;

use aquifer_trace::{Block, Random, Script};

use super::Setup;

/// Tensors of a chat: a key and a value for each layer.
const TENSORS: u64 = 32;
/// The growth of a tensor in a step.
const GROWTH: u64 = 1200 << 10;
/// The longest chat in steps: tensors stay below 10 MiB, so they share segments.
const LONGEST: u64 = 8;
const ROUNDS: u32 = 12;
/// The most memory for chats; the model takes the rest.
const FILLED_MAX: u64 = 32 << 30;

struct Chat {
    tensors: VecDeque<Block>,
    steps: u64,
    ends: u64,
}

pub(super) fn write(room: u64, mut random: Random) -> Setup {
    let mut script = Script::new("kv_cache", 1);
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
    // In the end most chats end.
    for chat in chats.into_iter().filter(|_| random.below(5) > 1) {
        script.free_all(chat.tensors);
    }
    Setup::most_of(script, room)
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

/// The largest total length of all chats: the program serves no more chats than fit.
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
