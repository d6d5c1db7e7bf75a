//! Two devices: each has its own allocator and streams, and buffers are copied from one to the
//! other.
use aquifer::prelude::*;

fn main() -> Result<(), aquifer::Error> {
    let devices = [aquifer::open("sim:24GiB")?, aquifer::open("sim:24GiB,ordinal=1")?]; // "cuda:0" and "cuda:1" on GPUs
    let memory = [Allocator::of(&devices[0])?, Allocator::of(&devices[1])?];
    let streams = [devices[0].stream()?, devices[1].stream()?];

    // Half of the work on each device.
    let halves = [vec![1.0_f32; 1024], vec![2.0_f32; 1024]];
    let mut parts = Vec::new();
    for ((memory, stream), half) in memory.iter().zip(&streams).zip(&halves) {
        let x = memory.from_slice(half, stream)?;
        let mut y = memory.alloc_zeros::<f32>(1024, stream)?;
        y.axpy(10.0, &x, stream)?;
        parts.push(y);
    }

    // The second part goes to the first device, over the link between them or by way of the host,
    // and is added there.
    let arrived = parts[1].to(&memory[0], &streams[0])?;
    parts[0].add_assign(&arrived, &streams[0])?;
    let sum = parts[0].sum(&streams[0])?.item(&streams[0])?;
    assert_eq!(sum, 30.0 * 1024.0);
    println!("both devices computed a half, and the first one added them: {sum}");

    // A buffer used on a stream of another device is an error that names both.
    if let Err(error) = parts[1].to_vec(&streams[0]) {
        println!("a buffer on a stream of the other device is refused: {error}");
    }
    // So is pinned memory: each allocator has its own.
    let pinned = memory[0].pinned_from_slice(&halves[0])?;
    if let Err(error) = parts[1].upload(&pinned, &streams[1]) {
        println!("pinned memory of the other device is refused: {error}");
    }
    Ok(())
}
