//! The device lacks memory.

use super::stand::in_steps;
use super::{Stand, Story};
use crate::exit::Failure;
use crate::text::Bytes;

pub(super) fn too_big(stand: &mut Stand) -> Result<Story, Failure> {
    stand.fill("weights", stand.percent(20))?;
    stand.fill("activations", stand.percent(10))?;
    let refusal = stand.request(stand.percent(110) + stand.spare)?;
    let less = in_steps(stand.percent(60));
    Ok(Story {
        refusal,
        recovered_by: format!("asking for {} instead", Bytes(less)),
        recovered: stand.is_served(less)?,
    })
}

pub(super) fn other_process(stand: &mut Stand) -> Result<Story, Failure> {
    stand.fill("weights", stand.percent(10))?;
    let Some(simulator) = stand.simulator.clone() else {
        return Err(Failure::Usage("this way needs a simulated device".to_owned()));
    };
    let others = stand.allocator.device().info().total_bytes - stand.free;
    // It leaves two fifths of the memory that the options allow.
    let held = stand.free - stand.allocator.headroom() - stand.percent(40);
    simulator.set_other_process_bytes(others + held);
    let refusal = stand.request(in_steps(stand.percent(50)))?;
    simulator.set_other_process_bytes(others);
    let recovered = stand.is_served(refusal.requested)?;
    Ok(Story { refusal, recovered_by: format!("the other process giving back {}", Bytes(held)), recovered })
}
