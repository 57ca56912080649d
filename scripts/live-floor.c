// The least that a server can do for streams of tokens: one thread, one epoll, one timer, and one send per token and
// client. It answers every request with the same bytes, which a real server sent: the head of the answer with the first
// token, one event per step, and the tail in the last of STEPS. `scripts/bench-pace.py` compares its CPU time with that of `slipstream serve`.
//
//   live-floor STEP_US STEPS HEAD CHUNK TAIL      the last three are files; prints its port
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { CLIENTS = 4096, BODY = 1 << 16 };

struct client {
    int open;
    int streaming;
    uint32_t sent; // events
    uint32_t have; // bytes of the request
    char request[BODY];
};

struct bytes {
    char *at;
    size_t len;
};

static struct client *clients[CLIENTS]; // by descriptor
static int highest = -1;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static struct bytes file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) fail(path);
    struct bytes b = {malloc(1 << 20), 0};
    b.len = fread(b.at, 1, 1 << 20, f);
    fclose(f);
    return b;
}

static void close_client(int fd) {
    close(fd);
    free(clients[fd]);
    clients[fd] = NULL;
}

// A client that does not read would need a queue; here it is an error of the benchmark.
static void put(int fd, struct bytes b) {
    if (send(fd, b.at, b.len, MSG_NOSIGNAL) != (ssize_t)b.len) close_client(fd);
}

// Bytes of a whole request at the start of `c`, or 0.
static size_t whole(struct client *c) {
    char *end = memmem(c->request, c->have, "\r\n\r\n", 4);
    if (!end) return 0;
    size_t head = (size_t)(end - c->request) + 4, body = 0;
    *end = 0;
    char *length = strcasestr(c->request, "content-length:");
    if (length) body = strtoul(length + 15, NULL, 10);
    *end = '\r';
    return c->have >= head + body ? head + body : 0;
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: live-floor STEP_US STEPS HEAD CHUNK TAIL\n");
        return 2;
    }
    long step_us = atol(argv[1]);
    uint32_t steps = (uint32_t)atol(argv[2]);
    // What load generators ask before they begin.
    static char list[] = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 49\r\n\r\n"
                         "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"created\":1}]}";
    struct bytes models = {list, sizeof list - 1};
    struct bytes head = file(argv[3]), chunk = file(argv[4]), tail = file(argv[5]);

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    if (bind(listener, (struct sockaddr *)&at, len) || listen(listener, 1024) ||
        getsockname(listener, (struct sockaddr *)&at, &len))
        fail("listen");
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK), poll = epoll_create1(0);
    struct itimerspec every = {
        .it_interval = {step_us / 1000000, step_us % 1000000 * 1000},
        .it_value = {step_us / 1000000, step_us % 1000000 * 1000},
    };
    if (timer < 0 || poll < 0 || timerfd_settime(timer, 0, &every, NULL)) fail("timer");
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener}, events[256];
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, &e);
    e.data.fd = timer;
    epoll_ctl(poll, EPOLL_CTL_ADD, timer, &e);
    printf("listening on http://127.0.0.1:%d\n", ntohs(at.sin_port));
    fflush(stdout);

    for (;;) {
        int ready = epoll_wait(poll, events, 256, -1);
        if (ready < 0 && errno != EINTR) fail("epoll_wait");
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd == timer) {
                uint64_t ticks;
                if (read(timer, &ticks, sizeof ticks) < 0) continue;
                for (int c = 0; c <= highest; c++) {
                    if (!clients[c] || !clients[c]->streaming) continue;
                    int last = ++clients[c]->sent == steps;
                    clients[c]->streaming = !last;
                    put(c, last ? tail : chunk);
                }
            } else if (fd == listener) {
                int one = 1, client = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (client < 0) continue;
                if (client >= CLIENTS || !(clients[client] = calloc(1, sizeof(struct client)))) {
                    close(client);
                    continue;
                }
                setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                if (client > highest) highest = client;
                e.data.fd = client;
                epoll_ctl(poll, EPOLL_CTL_ADD, client, &e);
            } else if (clients[fd]) {
                struct client *c = clients[fd];
                ssize_t got = recv(fd, c->request + c->have, BODY - c->have, 0);
                if (got <= 0) {
                    close_client(fd);
                    continue;
                }
                c->have += (uint32_t)got;
                size_t used = whole(c);
                if (used && !strncmp(c->request, "GET ", 4)) {
                    put(fd, models);
                    if (clients[fd]) c->have = 0;
                } else if (used) {
                    memmove(c->request, c->request + used, c->have - used);
                    c->have -= (uint32_t)used;
                    c->streaming = 1;
                    c->sent = 0;
                    put(fd, head);
                }
            }
        }
    }
}
