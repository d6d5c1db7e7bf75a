//! Operations that return what they make, called as if they changed their operand.

#![deny(unused_must_use)]

use aquifer::prelude::*;

fn wrong(x: &mut Buffer<f32>, tensor: &Tensor, stream: &Stream) -> Result<(), aquifer::Error> {
    x.like(stream)?;
    x.slice(1..);
    x.slice_mut(1..);
    x.reinterpret::<u32>();
    tensor.add(tensor, stream)?;
    Ok(())
}

fn main() {}
