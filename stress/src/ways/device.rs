//! The device does not have it.

use super::{Stand, Story, Way, no_options};
use crate::exit::Failure;
use crate::text::Bytes;

pub(super) const TOO_BIG: Way = Way {
    name: "too_big",
    summary: "asks for more than the device has",
    needs_simulator: None,
    served: false,
    options: no_options,
    run: too_big,
};

pub(super) const OTHER_PROCESS: Way = Way {
    name: "other_process",
    summary: "asks for what another process holds",
    needs_simulator: Some("another process can be told to take memory only on a simulated device"),
    served: false,
    options: no_options,
    run: other_process,
};

fn too_big(stand: &mut Stand) -> Result<Story, Failure> {
    stand.fill("weights", stand.percent(20))?;
    stand.fill("activations", stand.percent(10))?;
    let refusal = stand.request(stand.percent(110) + stand.spare)?;
    let less = stand.unrounded(stand.percent(60));
    Ok(Story {
        refusal,
        recovered_by: format!("asking for {} instead", Bytes(less)),
        recovered: stand.is_served(less)?,
    })
}

fn other_process(stand: &mut Stand) -> Result<Story, Failure> {
    stand.fill("weights", stand.percent(10))?;
    let Some(simulator) = stand.simulator.clone() else {
        return Err(Failure::Usage("this way needs a simulated device".to_owned()));
    };
    let others = stand.allocator.device().info().total_bytes - stand.free;
    // It leaves two fifths of what the options allow to be taken.
    let held = stand.free - stand.allocator.config().headroom - stand.percent(40);
    simulator.set_other_process_bytes(others + held);
    let refusal = stand.request(stand.unrounded(stand.percent(50)))?;
    simulator.set_other_process_bytes(others);
    let recovered = stand.is_served(refusal.requested)?;
    Ok(Story { refusal, recovered_by: format!("the other process giving back {}", Bytes(held)), recovered })
}
