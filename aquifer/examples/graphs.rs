//! A training step that is captured once and launched many times: one call enqueues all of it.
use aquifer::prelude::*;

fn main() -> Result<(), aquifer::Error> {
    let device = aquifer::open("sim:24GiB,violations=panic")?;
    let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    let gradient = memory.from_slice(&[1.0_f32; 1024], &stream)?;
    let mut weights = memory.alloc_zeros::<f32>(1024, &stream)?;

    // Called twice: the first step is done, the second one is captured.
    let step = memory.graph(&stream, |stream| {
        let mut scaled = memory.alloc_zeros::<f32>(1024, stream)?; // a temporary: each launch uses it again
        scaled.axpy(0.25, &gradient, stream)?;
        weights.axpy(-1.0, &scaled, stream)
    })?;
    for _ in 0..9 {
        step.launch(&stream)?; // ordered with all other work on the buffers
    }
    let weight = weights.slice(..1).item(&stream)?;
    assert_eq!(weight, -10.0 * 0.25);
    println!("ten steps, nine of them launches of one graph: each weight went from 0 to {weight}");
    Ok(())
}
