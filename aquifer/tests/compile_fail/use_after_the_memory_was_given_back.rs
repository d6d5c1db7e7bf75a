//! Reading registered memory through the buffer after its owner has it back.

use aquifer::Error;
use aquifer::transfer::PinnedPool;

fn wrong(pool: &PinnedPool) -> Result<u8, Error> {
    let host = pool.register(vec![0_u8; 4096])?;
    let values = host.into_vec()?;
    Ok(host.read()?[0] + values[1])
}

fn main() {}
