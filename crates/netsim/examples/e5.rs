use slipstream_netsim::scenario::*;use slipstream_netsim::*;use slipstream_netsim::topology::*;use slipstream_netsim::route::*;use slipstream_netsim::aqm::*;
fn cpu()->f64{let s=std::fs::read_to_string("/proc/self/schedstat").unwrap();s.split(' ').next().unwrap().parse::<f64>().unwrap()/1e9}
fn main(){
 let a:Vec<u32>=std::env::args().skip(1).map(|x|x.parse().unwrap()).collect();
 let (k,threads,lone)=(a[0],a[1],a.len()>2);
 let hpe=k/2; let l=Link{bits_per_s:100_000_000_000,delay_ns:1000};
 let t=Topology::FatTree(FatTree::new(k,hpe).unwrap());
 let n=t.host_count(); let flows=(0..if lone {1} else {n}).map(|i|Flow{id:i as u64,src:i,dst:(i+n/2)%n,start_ns:0,demand:Demand::Bytes(1048576),transport:Transport::Tcp(Tcp::new_reno()),paths:Paths::By(Routing::Ecmp),packet_bytes:1460,header_bytes:0,ack_bytes:40,class:0,after:vec![],collective:None}).collect();
 let sc=Scenario{seed:51001,duration_ns:10_000_000_000,topology:t,links:Links{host:Some(l),edge:l,core:l},queue:Queue{capacity_packets:200,aqm:Aqm::TailDrop,loss:0.0},flows,spray_paths:1};
 let ex=Execution{threads,..Default::default()};
 let t0=std::time::Instant::now();let c0=cpu();
 let mut s=Simulation::new(sc,ex).unwrap();
 let t1=std::time::Instant::now();let c1=cpu();
 s.run(ex,1000_000_000,&mut |_,_|{});
 let t2=std::time::Instant::now();let c2=cpu();
 let r=s.result();
 println!("shards {} windows {} setup {:?} {:.3} run {:?} main-thread cpu {:.3} ns/event {:.1}",s.shard_count(),s.windows(),t1-t0,c1-c0,t2-t1,c2-c1,(c2-c1)*1e9/r.totals.events as f64);
 println!("{:?} digest {:x} inflight {}",r.totals,r.digest,r.in_flight());
 let f=&r.flows; let clean=f.iter().filter(|f|f.retransmitted==0).count();
 let ok=f.iter().filter(|f|f.packets_sent==720&&f.cwnd==84515).count();
 println!("clean {clean} exact {ok} orig {} retx {} acks {} frtx {} rto {} end {:?}",f.iter().map(|f|f.packets_sent-f.retransmitted).sum::<u64>(),f.iter().map(|f|f.retransmitted).sum::<u64>(),f.iter().map(|f|f.acks).sum::<u64>(),f.iter().map(|f|f.fast_retransmits).sum::<u32>(),f.iter().map(|f|f.timeouts).sum::<u32>(),f.iter().map(|f|f.acked_ns).max());
 println!("{:?}",f[0]);
}
