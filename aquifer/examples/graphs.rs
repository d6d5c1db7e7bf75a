//! A training step that is captured once and launched many times: one call enqueues all of it.
use aquifer::memory::PoolOptions;
use aquifer::prelude::*;

fn main() -> Result<(), aquifer::Error> {
    let device = aquifer::open("sim:24GiB,violations=panic")?;
    let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    let gradient = memory.from_slice(&[1.0_f32; 1024], &stream)?;
    let mut weights = memory.alloc_zeros::<f32>(1024, &stream)?;
    weights.axpy(-0.5, &gradient, &stream)?; // the first call loads the kernels, which no capture may

    let pool = memory.create_pool(PoolOptions::default())?; // what is allocated for the graph stays the graph's
    let capture = stream.begin_capture()?;
    let route = memory.capture(&stream, &pool)?;
    {
        let mut scaled = memory.alloc_zeros::<f32>(1024, &stream)?; // a temporary: each launch uses it again
        scaled.axpy(0.25, &gradient, &stream)?;
        weights.axpy(-1.0, &scaled, &stream)?;
    }
    let graph = capture.end()?;
    drop(route);

    for _ in 0..10 {
        // The graph uses its buffers like any other work: this orders it with what other streams do
        // with them.
        with(&stream, [read(&gradient), write(&mut weights)], |stream, _| graph.launch(stream))?;
    }
    let weight = weights.slice(..1).item(&stream)?;
    assert_eq!(weight, -0.5 - 10.0 * 0.25);
    println!("ten launches of one graph: each weight went from -0.5 to {weight}");
    Ok(())
}
